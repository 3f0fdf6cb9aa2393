"""Who is there, as the broker sees it: silence counts only while it could have heard."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from common.bus.memory import MemoryServer
from common.bus.storage import WORKER_TTL_S
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.requests import WorkerRef
from services.broker.presence import Presence

WORKER = WorkerRef(worker_id="decode-0", incarnation="i1")
_SWEEP_S = 0.1


def _presence(clock: VirtualClock, gone: list[WorkerRef], metrics: Metrics | None = None) -> Presence:
    bus = MemoryServer(clock).connect()
    return Presence(bus, clock, structlog.get_logger(), metrics=metrics or Metrics(), on_gone=gone.append)


async def _judge_for(presence: Presence, clock: VirtualClock, seconds: float) -> None:
    for _ in range(round(seconds / _SWEEP_S)):
        await clock.sleep(_SWEEP_S)
        presence.judge_silence()


def test_silence_while_this_process_stood_still_says_nothing() -> None:
    """A frozen broker that goes on must not take its workers for dead; those that stay silent afterwards are."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        presence = _presence(clock, gone)
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
        presence = _presence(clock, gone)
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
        presence = _presence(clock, gone)
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
        presence = _presence(clock, gone)
        silent = WorkerRef(worker_id="decode-1", incarnation="i1")
        for _ in range(2):
            presence.expect(silent)
            await _judge_for(presence, clock, WORKER_TTL_S / 2 + _SWEEP_S)
        assert gone == [silent]

    run_virtual(scenario)


def test_a_start_whose_place_is_taken_while_it_lives_is_counted() -> None:
    """Two processes of one id are seen by it; a restart after silence or a farewell is none, nor is a start's next sign of life."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[WorkerRef] = []
        metrics = Metrics()
        presence = _presence(clock, gone, metrics)
        starts = [WorkerRef(worker_id=WORKER.worker_id, incarnation=f"i{number}") for number in range(1, 5)]
        presence.heard(starts[0])
        presence.heard(starts[0])
        await _judge_for(presence, clock, 2 * WORKER_TTL_S)
        presence.heard(starts[1])
        presence.left(WORKER.worker_id)
        presence.heard(starts[2])
        assert b"pdmesh_broker_workers_replaced_total 0.0" in metrics.exposition()
        with capture_logs() as lines:
            presence.heard(starts[3])
            presence.heard(starts[3])
        assert b"pdmesh_broker_workers_replaced_total 1.0" in metrics.exposition()
        told = {"worker_id": WORKER.worker_id, "incarnation": "i3"}
        assert lines == [
            {"event": "worker_replaced", "log_level": "info", **told, "by_incarnation": "i4"},
            {"event": "worker_gone", "log_level": "info", **told},
        ]
        presence.heard(starts[2])
        assert b"pdmesh_broker_workers_replaced_total 2.0" in metrics.exposition()
        assert gone == [*starts[:3], starts[3]]

    run_virtual(scenario)
