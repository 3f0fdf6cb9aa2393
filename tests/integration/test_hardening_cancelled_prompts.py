"""A client that leaves between its prompt and the submit: only the worker knows of it, and must forget it."""

import base64
import hashlib
from array import array

import pytest

from common.worker.service import WorkerService
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.requests import Accepted, CancelWork, PromptFrame, Refused
from contracts.subjects import WorkerVerb
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.worker_world import HANDOFF, REQUEST, Mesh, in_mesh

DATA = array("I", [1, 2, 3]).tobytes()
FRAME = PromptFrame(
    handoff_id=HANDOFF,
    index=0,
    num_frames=1,
    num_prompt_tokens=3,
    prompt_hash=hashlib.sha256(DATA).hexdigest(),
    timeout_ms=600_000,
    ids_b64=base64.b64encode(DATA).decode(),
)


@pytest.mark.parametrize(("kind", "worker_id"), [(PrefillService, "prefill-0"), (MixedService, "mixed-0")])
def test_a_cancelled_prompt_that_nobody_ran_is_dropped(kind: type[WorkerService], worker_id: str) -> None:
    """Nothing stays in the buffer until the request's deadline, and a frame that comes late does not come back to it."""

    async def scenario(mesh: Mesh) -> None:
        worker = await mesh.add(kind, worker_id)
        for _ in range(2):
            accepted = await mesh.ask(kind.role, worker_id, WorkerVerb.PROMPT, FRAME)
            assert accepted == Accepted(handoff_id=HANDOFF)
            await mesh.bus.publish(subjects.cancel(worker_id, REQUEST), encode(CancelWork(handoff_id=HANDOFF)))
            await mesh.clock.sleep(0.1)
            assert len(worker.prompts) == 0

    in_mesh(scenario)


def test_a_reservation_that_comes_after_its_cancel_is_refused() -> None:
    """Nobody would use the memory."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(PrefillService, "prefill-0")
        await mesh.add(DecodeService, "decode-0")
        await mesh.linked()
        await mesh.bus.publish(subjects.cancel("decode-0", REQUEST), encode(CancelWork(handoff_id=HANDOFF)))
        await mesh.clock.sleep(0.1)
        refused = await mesh.reserve()
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.CANCELLED
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_run_that_counts_another_number_of_tokens_than_came_is_refused() -> None:
    """Blocks were reserved for the number that the broker was told; the prompt must be of that length."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(PrefillService, "prefill-0")
        await mesh.add(DecodeService, "decode-0")
        await mesh.linked()
        await mesh.send_prompt("prefill", "prefill-0")
        refused = await mesh.run(await mesh.reserve(), num_prompt_tokens=39)
        assert isinstance(refused, Refused)
        assert "num_prompt_tokens" in refused.error.message
        assert len(mesh.services["prefill-0"].prompts) == 0

    in_mesh(scenario)
