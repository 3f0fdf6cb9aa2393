"""A decode worker that pulls, and whose source cannot be linked, or not linked anew."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.bus.memory import MemoryBus
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG
from common.engine.port import EngineError
from common.runtime.clock import Deadline
from common.worker.core.doubts import MAX_FAILED_IN_A_ROW, Connection
from contracts import subjects
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import Reserved
from contracts.requests import Accepted, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from services.decode.core.judged_shards import Judged
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.leaderless import Leaderless
from tests.integration.pulling_pair import computed, engine_of, pull_ended, pulling_pair, release
from tests.integration.worker_world import HANDOFF, Mesh, in_mesh

LINK = Connection(peer=WorkerRef(worker_id="prefill-0", incarnation="i-prefill-0"), own_dp_rank=0, peer_dp_rank=0)


@pytest.mark.parametrize(
    ("timeout_ms", "code"), [(60_000, ErrorCode.TRANSFER_FAILED), (1_000, ErrorCode.DEADLINE_EXCEEDED)]
)
def test_a_source_that_swallows_what_is_said_to_it_costs_no_request_its_time(timeout_ms: int, code: ErrorCode) -> None:
    """A wait for a link that is over is no deadline of the request, which goes to another source; its own deadline is."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        engine = engine_of(mesh)

        async def swallowed(peer: WorkerRef, ranks: Any) -> None:
            del peer, ranks
            await mesh.clock.sleep(10.0)
            raise EngineError("rank 0: no answer within 10 s", code=ErrorCode.DEADLINE_EXCEEDED)

        engine.link_source = swallowed  # type: ignore[method-assign]  # as over a network that drops packets
        await mesh.add(PrefillService, "prefill-1", tp=2)
        source = WorkerRef(worker_id="prefill-1", incarnation="i-prefill-1")
        began = mesh.clock.monotonic()
        answer = await mesh.reserve(source=source, timeout_ms=timeout_ms)
        assert isinstance(answer, Refused)
        assert answer.error.code is code
        assert answer.error.message.startswith("decode-0 cannot read from prefill-1: ")
        assert mesh.clock.monotonic() - began == pytest.approx(min(4.0, timeout_ms / 1000), abs=0.1)
        assert isinstance(await mesh.reserve(), Reserved), "another source"
        await mesh.release("decode", "decode-0")

    in_mesh(scenario)


def test_a_pull_whose_source_cannot_be_linked_anew_is_tried_elsewhere() -> None:
    """It was linked when the memory was reserved; what becomes of the new link is no deadline of the request either."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        engine = engine_of(mesh)
        source = await computed(mesh)

        async def swallowed(peer: WorkerRef, ranks: Any) -> None:
            del peer, ranks
            await mesh.clock.sleep(1.0)
            raise EngineError("rank 0: no answer", code=ErrorCode.DEADLINE_EXCEEDED)

        engine.link_source = swallowed  # type: ignore[method-assign]  # as over a network that drops packets
        for _ in range(MAX_FAILED_IN_A_ROW):
            service._sources.note(Judged(moved=(), failed=(LINK,)))
        answer = await mesh.pull(source)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.TRANSFER_FAILED
        assert answer.error.message == "decode-0 cannot read from prefill-0: rank 0: no answer"
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_pulls_that_never_find_their_link_get_it_made_anew() -> None:
    """The worker believes that it is linked, and its ranks know of no link: after some pulls it is linked again, and pulls go on."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        source = await computed(mesh)
        await engine_of(mesh).unlink(LINK.peer)
        service._sources.note(Judged(moved=(msgspec.structs.replace(LINK, peer_dp_rank=1),), failed=()))
        for lock in range(1, MAX_FAILED_IN_A_ROW + 1):
            assert await mesh.pull(source, lock=lock) == Accepted(handoff_id=HANDOFF)
            ended = await pull_ended(mesh)
            assert ended.error is not None
            assert ended.error.code is ErrorCode.TRANSFER_FAILED
        assert await mesh.pull(source, lock=MAX_FAILED_IN_A_ROW + 1) == Accepted(handoff_id=HANDOFF)
        assert (await pull_ended(mesh)).error is None
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_source_that_comes_back_keeps_its_new_link() -> None:
    """What was begun to undo the link before waits for a step that takes long; by its turn the same start is linked anew."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        source = await computed(mesh)
        async with service.replicas[0].loop.lock:
            service._sources._lost("prefill-0")
            while not (found := service._sources._sources.get("prefill-0")) or not found.is_linked:
                await mesh.clock.sleep(0.1)
        assert await mesh.pull(source) == Accepted(handoff_id=HANDOFF)
        assert (await pull_ended(mesh)).error is None
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_source_that_was_named_after_its_end_leaves_no_link_behind() -> None:
    """Somebody asks for the start that is gone, and it does not answer: what is left of its link is undone all the same."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        ref = WorkerRef(worker_id="prefill-0", incarnation="i-prefill-0")
        assert ref in engine_of(mesh)._links
        gone = mesh.services["prefill-0"].bus
        assert isinstance(gone, MemoryBus)
        await gone.close()
        await mesh.bus.subscribe(subjects.worker_rpc("prefill", "prefill-0", WorkerVerb.DESCRIBE))  # and never answers
        async with service.replicas[0].loop.lock:
            service._sources._lost("prefill-0")
            await mesh.clock.sleep(0.1)
            waits = mesh.group.create_task(_refused(service, ref, Deadline.after(mesh.clock, 60.0)))
            await mesh.clock.sleep(0.1)
        await waits
        await mesh.clock.sleep(0.1)
        assert service._sources._sources == {}
        assert engine_of(mesh)._links == {}

    in_mesh(scenario)


async def _refused(service: DecodeService, ref: WorkerRef, deadline: Deadline) -> None:
    """Ask for a source that cannot be had."""
    with pytest.raises(PdmeshError):
        await service._sources.linked(ref, deadline)


def test_links_outlast_a_bucket_that_does_not_answer() -> None:
    """Neither side takes the other for gone because nobody's sign of life can be heard; silence counts again afterwards."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        prefill = mesh.services["prefill-0"]
        assert isinstance(prefill, PrefillService)
        assert isinstance(await mesh.reserve(), Reserved)
        faults = mesh.server.faults = Leaderless(WORKERS_CONFIG)
        for _ in range(10):
            await mesh.clock.sleep(WORKER_TTL_S / 4)
            assert service._sources._sources["prefill-0"].is_linked
            assert prefill.links.met("decode-0", "i-decode-0") is not None
        faults.is_electing = False
        await mesh.clock.sleep(WORKER_TTL_S)
        assert service._sources._sources["prefill-0"].is_linked
        assert prefill.links.met("decode-0", "i-decode-0") is not None
        await mesh.release("decode", "decode-0")
        for host in mesh.hosts:
            for task in host._tasks:
                if task.get_name() in {"registration", "own_lease"}:
                    task.cancel()
        await mesh.clock.sleep(4 * WORKER_TTL_S)
        assert "prefill-0" not in service._sources._sources
        assert prefill.links.met("decode-0", "i-decode-0") is None

    in_mesh(scenario)
