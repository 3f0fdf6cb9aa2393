"""Who is there, as the broker sees it: silence counts only while it could have heard."""

from __future__ import annotations

import structlog

from common.bus.memory import MemoryServer
from common.bus.storage import WORKER_TTL_S
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.requests import WorkerRef
from services.broker.presence import Presence

WORKER = WorkerRef(worker_id="decode-0", incarnation="i1")
_SWEEP_S = 0.1


async def _judge_for(presence: Presence, clock: VirtualClock, seconds: float) -> None:
    for _ in range(round(seconds / _SWEEP_S)):
        await clock.sleep(_SWEEP_S)
        presence.judge_silence()


def test_silence_while_this_process_stood_still_says_nothing() -> None:
    """A frozen broker that goes on must not take its workers for dead; those that stay silent afterwards are."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        presence = Presence(MemoryServer(clock).connect(), clock, structlog.get_logger(), on_gone=gone.append)
        presence.heard(WORKER)
        await _judge_for(presence, clock, WORKER_TTL_S / 2)
        await clock.sleep(2 * WORKER_TTL_S)
        await _judge_for(presence, clock, WORKER_TTL_S)
        assert gone == []
        assert not presence.is_gone(WORKER)
        await _judge_for(presence, clock, 2 * WORKER_TTL_S)
        assert gone == [WORKER]
        assert presence.is_gone(WORKER)

    run_virtual(scenario)


def test_silence_of_a_worker_is_noticed_in_time() -> None:
    """While the broker looks, a worker that falls silent is gone after its ttl."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        presence = Presence(MemoryServer(clock).connect(), clock, structlog.get_logger(), on_gone=gone.append)
        presence.heard(WORKER)
        await _judge_for(presence, clock, WORKER_TTL_S - 2 * _SWEEP_S)
        assert gone == []
        await _judge_for(presence, clock, 4 * _SWEEP_S)
        assert gone == [WORKER]

    run_virtual(scenario)


def test_a_worker_that_an_earlier_broker_knew_is_missed_if_it_is_never_heard() -> None:
    """Silence, another start and a farewell each tell that it is gone, once; a sign of life tells that it is not."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        presence = Presence(MemoryServer(clock).connect(), clock, structlog.get_logger(), on_gone=gone.append)
        alive, silent, replaced, left, late = (
            WorkerRef(worker_id=f"decode-{number}", incarnation="i1") for number in range(1, 6)
        )
        for worker in (alive, silent, replaced, left):
            presence.expect(worker)
        presence.heard(alive)
        presence.heard(WorkerRef(worker_id=replaced.worker_id, incarnation="i2"))
        assert gone == [replaced]
        presence.left(left.worker_id)
        assert gone == [replaced, left]
        presence.heard(WorkerRef(worker_id=late.worker_id, incarnation="i2"))
        for _ in range(2):
            presence.expect(late)
        assert gone == [replaced, left, late]
        await _judge_for(presence, clock, WORKER_TTL_S - 2 * _SWEEP_S)
        presence.heard(alive)
        assert gone == [replaced, left, late]
        await _judge_for(presence, clock, 4 * _SWEEP_S)
        assert silent in gone
        assert alive not in gone
        assert all(presence.is_gone(worker) for worker in (silent, replaced, left, late))

    run_virtual(scenario)


def test_whoever_is_expected_again_is_missed_no_later() -> None:
    """Work that comes for a worker that nobody has heard is no sign of its life."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        presence = Presence(MemoryServer(clock).connect(), clock, structlog.get_logger(), on_gone=gone.append)
        silent = WorkerRef(worker_id="decode-1", incarnation="i1")
        for _ in range(2):
            presence.expect(silent)
            await _judge_for(presence, clock, WORKER_TTL_S / 2 + _SWEEP_S)
        assert gone == [silent]

    run_virtual(scenario)
