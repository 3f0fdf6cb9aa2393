"""A thread that writes a rank's finished cache content into one decode worker while later layers are computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.dataplane.port import Outcome, Region, TransferResult
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_report import PushReporter
from common.engine.transfer.push_task import PushTask
from common.engine.transfer.push_write import PushPart, write_parts
from common.runtime.clock import Clock
from contracts.rank import PushOutcome

MAX_QUEUED: Final = 1 << 16
"""Most tasks of one lane, some 8 MB. What they name is in the caches, so a rank without a free block or slot queues no more, and far
fewer: a prompt of a model of 64 layers has 32 for each of its chunks, and 96 states at its end.
"""
MAX_BATCHED: Final = 32
"""Most tasks of one batch: what has to wait for the end of a write, a release among others, must not wait long."""
WRITE_TIMEOUT_S: Final = 30.0

_OUTCOMES: Final = {
    Outcome.DONE: PushOutcome.DONE,
    Outcome.FAILED_QUIESCED: PushOutcome.FAILED_QUIESCED,
    Outcome.INDETERMINATE: PushOutcome.INDETERMINATE,
}

_Item = tuple[PushTask, PushPart]


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What is taken from the queue at once: tasks of one sequence and the parts that they owe, or why those could not be found."""

    tasks: list[PushTask]
    items: list[_Item]
    error: Exception | None = None


class PushLane:
    """A bounded queue of tasks for one worker and the thread that works it off. What becomes of them goes to `reporter`.

    What is queued of one sequence is written at once, with one transfer to each destination rank, and reported part by part.
    Nothing waits for a batch to fill. After a part of a sequence has failed, the rest of the sequence is reported as NOT_TRIED; after
    a write without a known end, everything that is queued to the same `Peer` has failed.

    When the queue is full, a sequence with more to push has failed: that is reported once, and what is queued of it is forgotten.
    Whatever goes wrong in the thread fails the sequence that it was busy with, and the thread goes on with the others.
    """

    def __init__(
        self,
        *,
        rank: int,
        worker_id: str,
        region: Region,
        clock: Clock,
        reporter: PushReporter,
        faults: PushFaults,
        shaper: LinkShaper,
    ) -> None:
        self._rank = rank
        self._shaper = shaper
        self._region = region
        self._clock = clock
        self._reporter = reporter
        self._faults = faults
        self._changed = threading.Condition()
        self._queues: dict[int, deque[PushTask]] = {}
        self._num_tasks = 0
        self._delayed: list[tuple[float, _Item]] = []
        self._busy_with: int | None = None
        self._num_busy = 0
        self._failed: dict[int, str] = {}
        self._refused: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"pusher-{rank}-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Tasks not finished, and parts that a failpoint holds back."""
        with self._changed:
            return self._num_tasks + len(self._delayed) + self._num_busy

    def submit(self, tasks: Sequence[PushTask]) -> None:
        """Queue tasks that became ready together. Never waits for room: a sequence whose tasks find none has failed."""
        by_seq: dict[int, list[PushTask]] = {}
        for task in tasks:
            by_seq.setdefault(task.seq, []).append(task)
        refused: list[PushTask] = []
        reason = f"the queue to its worker is full: {MAX_QUEUED} pushes wait"
        with self._changed:
            for seq, group in by_seq.items():
                if seq in self._refused:
                    continue
                if self._closed:
                    reason = "the thread that writes to its worker has ended"
                elif self._num_tasks + len(self._delayed) + len(group) <= MAX_QUEUED:
                    self._queues.setdefault(seq, deque()).extend(group)
                    self._num_tasks += len(group)
                    continue
                self._forget({seq})
                self._refused.add(seq)
                self._failed.setdefault(seq, reason)
                refused.append(group[0])
            self._changed.notify_all()
        for task in refused:
            self._reporter.failed(task, reason)

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget the tasks of sequences that have not begun. One under way goes on: see `wait_idle`."""
        dropped = set(seqs)
        with self._changed:
            self._forget(dropped)
            self._refused -= dropped
            for seq in dropped:
                self._failed.pop(seq, None)
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

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing any more: it has been closed, or its thread could not go on."""
        with self._changed:
            return self._closed

    def close(self) -> None:
        """Drop everything and let the thread end: see `join`. Idempotent."""
        with self._changed:
            self._close()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `close`, so long at most."""
        self._thread.join(max(0.0, timeout_s))

    # Under the lock.

    def _close(self) -> None:
        self._closed = True
        self._queues.clear()
        self._delayed.clear()
        self._num_tasks = 0
        self._changed.notify_all()

    def _forget(self, seqs: set[int]) -> None:
        for seq in seqs:
            self._num_tasks -= len(self._queues.pop(seq, ()))
        self._delayed = [(due, item) for due, item in self._delayed if item[0].seq not in seqs]

    def _begin(self, seq: int, num_tasks: int) -> None:
        self._busy_with, self._num_busy = seq, num_tasks
        self._changed.notify_all()

    def _take_tasks(self) -> list[PushTask]:
        """What is queued of the sequence whose turn it is; a sequence with more goes to the end of the row."""
        seq, queue = next(iter(self._queues.items()))
        first, num_tasks = queue[0], 1
        while (
            num_tasks < min(len(queue), MAX_BATCHED)
            and queue[num_tasks].grant is first.grant
            and queue[num_tasks].peer is first.peer
        ):
            num_tasks += 1
        del self._queues[seq]
        tasks = [queue.popleft() for _ in range(num_tasks)]
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

    # In the thread.

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._perform(batch)
        except Exception as error:  # noqa: BLE001 - of no sequence: nobody knows what is left, so all that wait are told
            self._break_down(error)

    def _next(self) -> _Batch | None:
        """Wait for what to push next, all of one sequence and grant; None when the pusher is closed."""
        with self._changed:
            while not self._closed:
                now = self._clock.monotonic()
                if self._delayed and min(due for due, _ in self._delayed) <= now:
                    place = min(range(len(self._delayed)), key=lambda index: self._delayed[index][0])
                    _, item = self._delayed.pop(place)
                    self._begin(item[0].seq, 1)
                    return _Batch(tasks=[item[0]], items=[item])
                if self._queues:
                    tasks = self._take_tasks()
                    self._begin(tasks[0].seq, len(tasks))
                    try:
                        return _Batch(tasks=tasks, items=self._parts_of(tasks, now))
                    except Exception as error:  # noqa: BLE001 - told when the lock is free: it is the sequence's failure
                        return _Batch(tasks=tasks, items=[], error=error)
                soonest = min((due for due, _ in self._delayed), default=None)
                self._changed.wait(None if soonest is None else soonest - now)
            return None

    def _perform(self, batch: _Batch) -> None:
        """Push a batch; what goes wrong is reported as the failure of its sequence."""
        try:
            self._push_all(batch)
        except Exception as error:  # noqa: BLE001 - whatever it was, the receiver waits for this sequence, and others for this thread
            task = batch.tasks[0]
            reason = reason_of(error, f"pushing sequence {task.seq} of rank {self._rank}")
            self._note_failure(task.seq, reason)
            self._reporter.failed(task, reason, is_unclear=bool(task.peer.lost))
        finally:
            with self._changed:
                self._busy_with = None
                self._num_busy = 0
                self._changed.notify_all()

    def _push_all(self, batch: _Batch) -> None:
        if batch.error is not None:
            raise batch.error
        by_rank: dict[int, list[_Item]] = {}
        for item in batch.items:
            by_rank.setdefault(item[1].copies.part.dst_rank, []).append(item)
        for dst_rank, group in by_rank.items():
            self._push(dst_rank, group)

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
            self._note_failure(task.seq, reason)
        elif failed is None:
            deadline = self._clock.monotonic() + WRITE_TIMEOUT_S
            result = write_parts(task.peer, dst_rank, task.grant, parts, self._region, self._faults, deadline)
            outcome = PushOutcome.STALE if result.is_stale else _OUTCOMES[result.outcome]
            if result.outcome is Outcome.INDETERMINATE:
                task.peer.lost.append(result.reason or result.outcome.value)
            if result.outcome is not Outcome.DONE:
                self._note_failure(task.seq, result.reason or result.outcome.value)
            self._wait_until(self._shaper.over_at(self._rank, dst_rank, result.nbytes, began))
        else:
            result = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=f"an earlier part failed: {failed}")
            outcome = PushOutcome.NOT_TRIED
        if lost := self._reporter.ended(items, outcome, result, began_ns):
            self._note_failure(task.seq, lost)

    def _wait_until(self, moment: float) -> None:
        """Wait, as a slow link would have it, unless the pusher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.0, moment - self._clock.monotonic()))

    def _note_failure(self, seq: int, reason: str) -> None:
        with self._changed:
            self._failed.setdefault(seq, reason)

    def _break_down(self, error: Exception) -> None:
        """Take nothing any more, and report every sequence that waits as failed."""
        with self._changed:
            waiting = {queue[0].seq: queue[0] for queue in self._queues.values() if queue}
            waiting |= {item[0].seq: item[0] for _, item in self._delayed}
            self._busy_with, self._num_busy = None, 0
            self._close()
        reason = reason_of(error, f"choosing what rank {self._rank} pushes next")
        for task in waiting.values():
            self._reporter.failed(task, reason)
