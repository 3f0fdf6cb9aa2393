"""A thread that writes a rank's finished cache content into one decode worker while later layers are computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.dataplane.port import Outcome, Region, TransferResult
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_write import PushPart, write_parts
from common.layout.bind import TokenChunk
from common.runtime.clock import Clock
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome

MAX_QUEUED: Final = 4096
MAX_BATCHED: Final = 32
"""Most tasks of one batch: what has to wait for the end of a write, a release among others, must not wait long."""
SUBMIT_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 30.0

_OUTCOMES: Final = {
    Outcome.DONE: PushOutcome.DONE,
    Outcome.FAILED_QUIESCED: PushOutcome.FAILED_QUIESCED,
    Outcome.INDETERMINATE: PushOutcome.INDETERMINATE,
}


@dataclass(frozen=True, kw_only=True)
class PushTask:
    """What one layer's cache of one sequence has ready: KEY or VALUE of a chunk, or the state in `slot` (then `chunk` is None).

    Blocks and slot are the source's, `grant` names the destination's. `queued_ns` is when the content was complete.
    """

    seq: int
    handoff_id: str
    peer: Peer
    grant: Grant
    namespace: Namespace
    role: Role
    layer: int
    chunk: TokenChunk | None
    slot: int
    queued_ns: int


_Item = tuple[PushTask, PushPart]


class PushLane:
    """A bounded queue of tasks for one worker and the thread that works it off. Reports go to `emit`, from that thread.

    What is queued of one sequence is written at once, with one transfer to each destination rank, and reported part by part.
    Nothing waits for a batch to fill. After a part of a sequence has failed, the rest of the sequence is reported as NOT_TRIED; after
    a write without a known end, everything that is queued to the same `Peer` has failed. When the queue is full, `submit` waits: the computation must not run further ahead.
    """

    def __init__(
        self,
        *,
        rank: int,
        worker_id: str,
        region: Region,
        clock: Clock,
        emit: Callable[[PartPushed], None],
        faults: PushFaults,
        shaper: LinkShaper,
    ) -> None:
        self._rank = rank
        self._shaper = shaper
        self._region = region
        self._clock = clock
        self._emit = emit
        self._faults = faults
        self._changed = threading.Condition()
        self._queues: dict[int, deque[PushTask]] = {}
        self._num_tasks = 0
        self._delayed: list[tuple[float, _Item]] = []
        self._busy_with: int | None = None
        self._num_busy = 0
        self._failed: dict[int, str] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"pusher-{rank}-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Tasks not finished, and parts that a failpoint holds back."""
        with self._changed:
            return self._num_tasks + len(self._delayed) + self._num_busy

    def submit(self, tasks: Sequence[PushTask]) -> None:
        """Queue tasks that became ready together; waits while the queue is full. Raises `TimeoutError` when it stays full."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, SUBMIT_TIMEOUT_S):
                raise TimeoutError(f"{MAX_QUEUED} pushes are queued, and none was finished in {SUBMIT_TIMEOUT_S} s")
            for task in tasks:
                self._queues.setdefault(task.seq, deque()).append(task)
            self._num_tasks += len(tasks)
            self._changed.notify_all()

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget the tasks of sequences that have not begun. One under way goes on: see `wait_idle`."""
        dropped = set(seqs)
        with self._changed:
            for seq in dropped:
                self._num_tasks -= len(self._queues.pop(seq, ()))
                self._failed.pop(seq, None)
            self._delayed = [(due, item) for due, item in self._delayed if item[0].seq not in dropped]
            self._changed.notify_all()

    def wait_idle(self, seq: int, deadline: float) -> bool:
        """Whether nothing of `seq` is being written any more; waits for it until `deadline`. To be called after `drop`."""
        with self._changed:
            remaining = max(0.0, deadline - self._clock.monotonic())
            idle = self._changed.wait_for(lambda: self._busy_with != seq, remaining)
            if idle:
                self._failed.pop(seq, None)  # the last write may have failed after the sequence was dropped
            return idle

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way, and no failure is remembered of a sequence that goes on."""
        with self._changed:
            return not (self._num_tasks or self._delayed or self._num_busy or self._failed)

    def close(self) -> None:
        """Drop everything and let the thread end: see `join`. Idempotent."""
        with self._changed:
            self._closed = True
            self._queues.clear()
            self._delayed.clear()
            self._num_tasks = 0
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `close`, so long at most."""
        self._thread.join(max(0.0, timeout_s))

    def _wait_until(self, moment: float) -> None:
        """Wait, as a slow link would have it, unless the pusher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.0, moment - self._clock.monotonic()))

    def _has_room(self) -> bool:
        return self._closed or self._num_tasks + len(self._delayed) < MAX_QUEUED

    def _work(self) -> None:
        while True:
            items = self._next()
            if items is None:
                return
            try:
                by_rank: dict[int, list[_Item]] = {}
                for item in items:
                    by_rank.setdefault(item[1].copies.part.dst_rank, []).append(item)
                for dst_rank, group in by_rank.items():
                    self._push(dst_rank, group)
            except OSError:
                return  # nobody is left to report to: the rank is ending
            finally:
                with self._changed:
                    self._busy_with = None
                    self._num_busy = 0
                    self._changed.notify_all()

    def _next(self) -> list[_Item] | None:
        """Wait for the parts to push next, all of one sequence and grant; None when the pusher is closed."""
        with self._changed:
            while not self._closed:
                now = self._clock.monotonic()
                if self._delayed and min(due for due, _ in self._delayed) <= now:
                    place = min(range(len(self._delayed)), key=lambda index: self._delayed[index][0])
                    _, item = self._delayed.pop(place)
                    self._begin(item[0].seq, 1)
                    return [item]
                if self._queues:
                    tasks = self._take_tasks()
                    self._begin(tasks[0].seq, len(tasks))
                    return self._parts_of(tasks, now)
                soonest = min((due for due, _ in self._delayed), default=None)
                self._changed.wait(None if soonest is None else soonest - now)
            return None

    def _begin(self, seq: int, num_tasks: int) -> None:
        self._busy_with, self._num_busy = seq, num_tasks
        self._changed.notify_all()

    def _take_tasks(self) -> list[PushTask]:
        """What is queued of the sequence whose turn it is; a sequence with more goes to the end of the row."""
        seq = next(iter(self._queues))
        queue = self._queues.pop(seq)
        tasks = [queue.popleft()]
        while (
            queue and len(tasks) < MAX_BATCHED and queue[0].grant is tasks[0].grant and queue[0].peer is tasks[0].peer
        ):
            tasks.append(queue.popleft())
        if queue:
            self._queues[seq] = queue
        self._num_tasks -= len(tasks)
        return tasks

    def _parts_of(self, tasks: Iterable[PushTask], now: float) -> list[_Item]:
        """The parts of some tasks, without what failpoints drop or delay: that is the only part that is late."""
        items: list[_Item] = []
        for task in tasks:
            for copies in task.peer.parts.get((task.namespace, task.role, task.layer), ()):
                item = task, PushPart(copies=copies, chunk=task.chunk, slot=task.slot)
                if not self._faults:
                    items.append(item)
                elif not self._faults.is_dropped(copies.part):
                    delay_s = self._faults.delay_s(copies.part)
                    if delay_s:
                        self._delayed.append((now + delay_s, item))
                    else:
                        items.append(item)
        return items

    def _push(self, dst_rank: int, items: Sequence[_Item]) -> None:
        """Write parts of one sequence to one destination rank, and report each."""
        task = items[0][0]
        parts = [part for _, part in items]
        began, began_ns = self._clock.monotonic(), self._clock.monotonic_ns()
        with self._changed:
            failed = self._failed.get(task.seq)
        if failed is None and task.peer.lost:
            # Its worker stands still, as far as anybody can tell: whoever is queued would wait for it as long again.
            reason = f"an earlier write to the same peer has no end: {task.peer.lost[0]}"
            result = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=reason)
            outcome = PushOutcome.FAILED_QUIESCED
        elif failed is None:
            deadline = self._clock.monotonic() + WRITE_TIMEOUT_S
            result = write_parts(task.peer, dst_rank, task.grant, parts, self._region, self._faults, deadline)
            outcome = PushOutcome.STALE if result.is_stale else _OUTCOMES[result.outcome]
            self._wait_until(self._shaper.over_at(self._rank, dst_rank, result.nbytes, began))
        else:
            result = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=f"an earlier part failed: {failed}")
            outcome = PushOutcome.NOT_TRIED
        took_ns = self._clock.monotonic_ns() - began_ns
        if failed is None and result.outcome is not Outcome.DONE:
            with self._changed:
                self._failed.setdefault(task.seq, result.reason or result.outcome.value)
            if result.outcome is Outcome.INDETERMINATE:
                task.peer.lost.append(result.reason or result.outcome.value)
        total = sum(part.num_bytes for part in parts) or 1
        before = 0
        for each, part in items:
            for start, end in part.ranges:
                num_bytes = (end - start) * part.unit_bytes
                # The time of the whole write, shared out by bytes: the sum over all parts stays the time that was spent.
                started_ns = began_ns + took_ns * before // total
                before += num_bytes
                planned = part.copies.part
                self._emit(
                    PartPushed(
                        rank=self._rank,
                        seq=each.seq,
                        handoff_id=each.handoff_id,
                        namespace=planned.namespace,
                        role=planned.role,
                        layer=planned.layer,
                        destination_rank=planned.dst_rank,
                        start=start,
                        end=end,
                        num_bytes=num_bytes if result.outcome is Outcome.DONE else 0,
                        queued_ns=each.queued_ns,
                        started_ns=started_ns,
                        done_ns=began_ns + took_ns * before // total,
                        outcome=outcome,
                        reason=result.reason,
                    )
                )
