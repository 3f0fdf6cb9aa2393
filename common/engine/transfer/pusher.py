"""A rank's writing of finished cache content into decode workers: side by side, so that one that stands still holds up nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from common.dataplane.port import Region
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_lane import PushLane
from common.engine.transfer.push_report import PushReporter
from common.engine.transfer.push_task import PushTask
from common.runtime.clock import Clock
from contracts.rank import PartPushed

MAX_IDLE_LANES: Final = 64
"""Workers whose lanes are kept for their next task; idle threads cost little, but names may come and go."""
JOIN_TIMEOUT_S: Final = 5.0


class Pusher:
    """One lane, with a queue and a thread of its own, for each decode worker that is written to.

    Reports go to `emit`: from lanes, and from `submit` of what cannot be queued. All calls come from the rank's own thread. See
    `PushLane` for what a lane promises.
    """

    def __init__(
        self,
        *,
        rank: int,
        region: Region,
        clock: Clock,
        emit: Callable[[PartPushed], None],
        faults: PushFaults,
        shaper: LinkShaper,
    ) -> None:
        self._rank = rank
        self._region = region
        self._clock = clock
        self._reporter = PushReporter(rank, clock, emit)
        self._faults = faults
        self._shaper = shaper
        self._lanes: dict[str, PushLane] = {}

    @property
    def num_queued(self) -> int:
        """Tasks not finished, and parts that a failpoint holds back."""
        return sum(lane.num_queued for lane in self._lanes.values())

    def submit(self, tasks: Sequence[PushTask]) -> None:
        """Queue tasks that became ready together. Never raises, and never waits for a peer: this is amid a step of all ranks.

        What cannot be queued is reported as its sequence's failure.
        """
        by_worker: dict[str, list[PushTask]] = {}
        for task in tasks:
            by_worker.setdefault(task.grant.worker_id, []).append(task)
        for worker_id, group in by_worker.items():
            try:
                self._lane(worker_id).submit(group)
            except Exception as error:  # noqa: BLE001 - the other ranks compute on, and so must this one
                reason = reason_of(error, f"queueing what rank {self._rank} pushes to {worker_id}")
                for task in {task.seq: task for task in group}.values():
                    self._reporter.failed(task, reason)

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget the tasks of sequences that have not begun. One under way goes on: see `wait_idle`."""
        dropped = frozenset(seqs)
        for lane in self._lanes.values():
            lane.drop(dropped)

    def wait_idle(self, seq: int, deadline: float) -> bool:
        """Whether nothing of `seq` is being written any more; waits for it until `deadline`. To be called after `drop`."""
        return all(lane.wait_idle(seq, deadline) for lane in self._lanes.values())

    def end(self) -> None:
        """Drop everything and let the threads end, without waiting for them: see `close`. Idempotent."""
        for lane in self._lanes.values():
            lane.close()

    def close(self) -> None:
        """Drop everything and end the threads, within a bound: what is being written is waited for. Idempotent."""
        deadline = self._clock.monotonic() + JOIN_TIMEOUT_S
        self.end()
        for lane in self._lanes.values():
            lane.join(deadline - self._clock.monotonic())

    def _lane(self, worker_id: str) -> PushLane:
        lane = self._lanes.get(worker_id)
        if lane is None or lane.is_closed:
            self._end_idle()
            lane = self._lanes[worker_id] = PushLane(
                rank=self._rank,
                worker_id=worker_id,
                region=self._region,
                clock=self._clock,
                reporter=self._reporter,
                faults=self._faults,
                shaper=self._shaper,
            )
        return lane

    def _end_idle(self) -> None:
        """Make room for a new lane among very many: those that have nothing to do go."""
        if len(self._lanes) < MAX_IDLE_LANES:
            return
        for worker_id, lane in tuple(self._lanes.items()):
            if lane.is_idle:
                lane.close()
                del self._lanes[worker_id]
