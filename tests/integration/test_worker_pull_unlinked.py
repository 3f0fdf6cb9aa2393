"""Pulls and reservations whose source swallows what is said to it: each is refused in time, and none piles up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from common.engine.port import EngineError
from common.runtime.clock import Deadline
from common.worker.core.doubts import MAX_FAILED_IN_A_ROW, Connection
from contracts import subjects
from contracts.errors import ErrorCode
from contracts.handoff import Grant, PullHandoff, Reserved
from contracts.rank import PeerSide
from contracts.requests import Accepted, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from services.broker.calls import Calls
from services.decode.core.judged_shards import Judged
from services.decode.service import DecodeService
from tests.integration.pulling_pair import computed, engine_of, pull_ended, pulling_pair, release
from tests.integration.worker_world import HANDOFF, Mesh, in_mesh

SOURCE = WorkerRef(worker_id="prefill-0", incarnation="i-prefill-0")
LINK = Connection(peer=SOURCE, own_dp_rank=0, peer_dp_rank=0)
LINK_S = 10.0
PATIENCE_S = 2.0


class Swallowing:
    """In place of an engine's `link_source`: nothing of what is said to the source arrives, until the network is `well`."""

    def __init__(self, mesh: Mesh) -> None:
        self.well = False
        self.num_begun = 0
        self.verdicts: list[float] = []
        self._clock = mesh.clock
        self._engine = engine_of(mesh)
        self._engine.link_source = self  # type: ignore[method-assign]  # as over a network that drops packets

    async def __call__(self, peer: WorkerRef, ranks: Any) -> None:
        """See `Engine.link_source`."""
        self.num_begun += 1
        await self._clock.sleep(LINK_S)
        if self.well:
            self._engine._link(peer, PeerSide.SOURCE, ranks)
            return
        self.verdicts.append(self._clock.monotonic())
        raise EngineError("rank 0: no answer", code=ErrorCode.DEADLINE_EXCEEDED)


def undo_link(service: DecodeService) -> None:
    """As many pulls in a row have failed as it takes."""
    for _ in range(MAX_FAILED_IN_A_ROW):
        service._sources.note(Judged(moved=(), failed=(LINK,)))


def num_handlers() -> int:
    """Requests that workers are answering now, each in a task of a bounded group."""
    return sum(task.get_name().startswith("rpc-") for task in asyncio.all_tasks())


class Asker:
    """Asks for a pull as the broker does: again and again, with two seconds of patience for each delivery."""

    def __init__(self, mesh: Mesh, source: Grant) -> None:
        self.sent: list[float] = []
        self.answer: Accepted | Refused | None = None
        self._mesh = mesh
        self._message = PullHandoff(
            handoff_id=HANDOFF, incarnation="i-decode-0", fence=1, lock=1, source=source, timeout_ms=60_000
        )

    def _fresh(self) -> PullHandoff:
        self.sent.append(self._mesh.clock.monotonic())
        return self._message

    async def run(self) -> None:
        """Ask until there is an answer."""
        calls = Calls(self._mesh.bus, self._mesh.clock, call_timeout_s=PATIENCE_S, lost_after_s=5.0)
        subject = subjects.worker_rpc("decode", "decode-0", WorkerVerb.PULL)
        until = Deadline.after(self._mesh.clock, 50.0)
        self.answer = await calls.ask(subject, self._fresh, Accepted | Refused, until)


async def most(count: Callable[[], int], mesh: Mesh, task: asyncio.Task[None]) -> int:
    """The highest count until the task has ended."""
    highest = 0
    while not task.done():
        highest = max(highest, count())
        await mesh.clock.sleep(0.1)
    await task
    return highest


def test_a_broker_that_repeats_a_pull_hears_that_its_source_cannot_be_linked() -> None:
    """Each repeat takes the place of the one before, so one handler waits, and the verdict is heard by somebody who still listens."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        source = await computed(mesh)
        swallowing = Swallowing(mesh)
        undo_link(service)
        asker = Asker(mesh, source)
        assert num_handlers() == 0
        highest = await most(num_handlers, mesh, mesh.group.create_task(asker.run()))
        assert highest == 1
        assert isinstance(asker.answer, Refused)
        assert asker.answer.error.code is ErrorCode.TRANSFER_FAILED
        assert asker.answer.error.message == "decode-0 cannot read from prefill-0: rank 0: no answer"
        verdict = swallowing.verdicts[0]
        assert len([at for at in asker.sent if at < verdict]) > 1, "repeats while the link was being made"
        assert len([at for at in asker.sent if at >= verdict]) <= 1
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_repeated_pull_begins_once_when_its_source_is_linked() -> None:
    """The delivery that listens when the link is made is the one that is told so."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        source = await computed(mesh)
        swallowing = Swallowing(mesh)
        swallowing.well = True
        undo_link(service)
        asker = Asker(mesh, source)
        assert await most(num_handlers, mesh, mesh.group.create_task(asker.run())) == 1
        assert asker.answer == Accepted(handoff_id=HANDOFF)
        assert (swallowing.num_begun, len(asker.sent) > 1) == (1, True)
        assert (await pull_ended(mesh)).error is None
        assert mesh.heard.empty()
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_release_ends_a_pull_that_waits_for_its_link() -> None:
    """Nobody waits for a verdict that nobody needs."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        source = await computed(mesh)
        Swallowing(mesh)
        undo_link(service)
        began = mesh.clock.monotonic()
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await mesh.pull(source))

        asking = mesh.group.create_task(ask())
        await mesh.clock.sleep(0.5)
        await release(mesh)
        await asking
        assert mesh.clock.monotonic() - began < PATIENCE_S
        assert isinstance(answers[0], Refused)
        assert answers[0].error.code is ErrorCode.CANCELLED
        assert num_handlers() == 0
        mesh.assert_empty()

    in_mesh(scenario)


def test_after_a_link_that_failed_a_reservation_waits_for_no_other_try() -> None:
    """It is refused at once and goes elsewhere, while the link is tried again; once that has succeeded the pair is used again."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        swallowing = Swallowing(mesh)
        undo_link(service)
        while len(swallowing.verdicts) < 1:
            await mesh.clock.sleep(0.1)
        for num_begun in (2, 2):
            began = mesh.clock.monotonic()
            answer = await mesh.reserve()
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.TRANSFER_FAILED
            assert answer.error.message == "decode-0 cannot read from prefill-0: rank 0: no answer"
            assert mesh.clock.monotonic() - began < 0.1
            await mesh.clock.sleep(0.1)
            assert swallowing.num_begun == num_begun, "the next try was begun for it, and nobody waits for it"
        swallowing.well = True
        await mesh.clock.sleep(LINK_S)
        assert isinstance(await mesh.reserve(), Reserved)
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)
