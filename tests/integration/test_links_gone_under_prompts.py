"""Prompts that were accepted over a link which is gone when their turn comes."""

from __future__ import annotations

from typing import Any

from common.engine.port import EngineError
from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, Reserved
from contracts.rank import PushOutcome
from contracts.requests import Accepted, WorkerRef
from services.prefill.service import PrefillService
from tests.integration.part_pushes import part_pushed
from tests.integration.pulling_pair import engine_of
from tests.integration.worker_world import Mesh, in_mesh, pair


def test_a_prompt_that_waits_while_its_link_is_undone_is_tried_elsewhere() -> None:
    """It was accepted while the workers were linked, and waited for memory: nobody tells its client that it asked for nonsense."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, prefill={"num_slots": 1})
        prefill = mesh.services["prefill-0"]
        assert isinstance(prefill, PrefillService)
        for handoff in ("r1-0", "r2-0"):
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            reserved = await mesh.reserve(handoff=handoff)
            assert isinstance(reserved, Reserved)
            assert await mesh.run(reserved) == Accepted(handoff_id=handoff)
        first = await mesh.heard.get()
        assert isinstance(first, PrefillFinished)
        assert (first.handoff_id, first.error) == ("r1-0", None)

        async def unreachable(peer: WorkerRef, ranks: Any) -> None:
            del peer, ranks
            raise EngineError("rank 0: connection refused", code=ErrorCode.TRANSFER_FAILED)

        engine_of(mesh, "prefill-0").link = unreachable  # type: ignore[method-assign]  # the link is not made anew in this test
        prefill.links.note_push(0, part_pushed("r1-0", PushOutcome.INDETERMINATE))
        await mesh.clock.sleep(0.5)
        await mesh.release("prefill", "prefill-0", "r1-0")
        second = await mesh.heard.get()
        assert isinstance(second, PrefillFinished)
        assert second.handoff_id == "r2-0"
        assert second.error is not None
        assert second.error.code is ErrorCode.TRANSFER_FAILED
        assert second.error.rule.retryable
        await mesh.release("prefill", "prefill-0", "r2-0")
        for handoff in ("r1-0", "r2-0"):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)
