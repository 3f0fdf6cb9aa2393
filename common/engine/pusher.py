"""The thread of a rank that writes finished cache content into the decode worker while later layers are computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.engine.peers import PartCopies, Peer
from common.engine.push_faults import PushFaults
from common.layout.bind import bind_extents, bind_slot, extents
from common.layout.context_parallel import owned_ranges
from common.layout.run import Run
from common.layout.templates import PagedTemplate, SlotTemplate
from common.runtime.clock import Clock
from contracts.handoff import Grant
from contracts.manifest import Role
from contracts.rank import PartPushed, PushOutcome

MAX_QUEUED: Final = 4096
SUBMIT_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 5.0

_OUTCOMES: Final = {
    Outcome.DONE: PushOutcome.DONE,
    Outcome.FAILED_QUIESCED: PushOutcome.FAILED_QUIESCED,
    Outcome.INDETERMINATE: PushOutcome.INDETERMINATE,
}


@dataclass(frozen=True, kw_only=True)
class PushTask:
    """What one layer's cache of one sequence has ready: tokens `[start, end)` of KEY or VALUE, `[0, 1)` of a state.

    `block_ids` and `slot` are the source's, `grant` names the destination's. `queued_ns` is when the content was complete.
    """

    seq: int
    handoff_id: str
    peer: Peer
    grant: Grant
    role: Role
    layer: int
    block_ids: Sequence[int]
    slot: int
    start: int
    end: int
    queued_ns: int


class Pusher:
    """A bounded queue of tasks and the thread that works it off, in order. Reports go to `emit`, from that thread.

    After a part of a sequence has failed, the rest of the sequence is reported as failed without being tried. When the queue is
    full, `submit` waits: the computation must not run further ahead.
    """

    def __init__(
        self,
        *,
        rank: int,
        region: Region,
        block_size: int,
        clock: Clock,
        emit: Callable[[PartPushed], None],
        faults: PushFaults,
    ) -> None:
        self._rank = rank
        self._region = region
        self._block_size = block_size
        self._clock = clock
        self._emit = emit
        self._faults = faults
        self._changed = threading.Condition()
        self._tasks: deque[PushTask] = deque()
        self._busy_with: int | None = None
        self._failed: dict[int, str] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"pusher-{rank}", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Tasks not finished."""
        with self._changed:
            return len(self._tasks) + (self._busy_with is not None)

    def submit(self, task: PushTask) -> None:
        """Queue a task; waits while the queue is full. Raises `TimeoutError` when it stays full."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or len(self._tasks) < MAX_QUEUED, SUBMIT_TIMEOUT_S):
                raise TimeoutError(f"{MAX_QUEUED} pushes are queued, and none was finished in {SUBMIT_TIMEOUT_S} s")
            self._tasks.append(task)
            self._changed.notify_all()

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget the tasks of sequences that have not begun. One under way goes on: see `wait_idle`."""
        dropped = set(seqs)
        with self._changed:
            self._tasks = deque(task for task in self._tasks if task.seq not in dropped)
            for seq in dropped:
                self._failed.pop(seq, None)
            self._changed.notify_all()

    def wait_idle(self, seq: int, deadline: float) -> bool:
        """Whether nothing of `seq` is being written any more; waits for it until `deadline`."""
        with self._changed:
            remaining = max(0.0, deadline - self._clock.monotonic())
            return self._changed.wait_for(lambda: self._busy_with != seq, remaining)

    def close(self) -> None:
        """Drop everything and end the thread, within a bound. Idempotent."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._tasks))
                if self._closed:
                    return
                task = self._tasks.popleft()
                self._busy_with = task.seq
                self._changed.notify_all()
            try:
                for copies in task.peer.parts.get((task.role, task.layer), ()):
                    self._push_part(task, copies)
            except OSError:
                return  # nobody is left to report to: the rank is ending
            finally:
                with self._changed:
                    self._busy_with = None
                    self._changed.notify_all()

    def _push_part(self, task: PushTask, copies: PartCopies) -> None:
        part = copies.part
        if self._faults:
            if self._faults.is_dropped(part):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._faults.delay_s(part))
        ranges: Iterable[tuple[int, int]] = ((task.start, task.end),)
        if task.role in {Role.KEY, Role.VALUE}:
            ranges = owned_ranges(task.start, task.end, self._block_size, part.modulus, part.residue)
        for start, end in ranges:
            started_ns = self._clock.monotonic_ns()
            result = self._write(task, copies, start, end)
            if result.outcome is not Outcome.DONE:
                with self._changed:
                    self._failed.setdefault(task.seq, result.reason or result.outcome.value)
            self._emit(
                PartPushed(
                    rank=self._rank,
                    seq=task.seq,
                    handoff_id=task.handoff_id,
                    namespace=part.namespace,
                    role=part.role,
                    layer=part.layer,
                    destination_rank=part.dst_rank,
                    start=start,
                    end=end,
                    num_bytes=result.nbytes,
                    queued_ns=task.queued_ns,
                    started_ns=started_ns,
                    done_ns=self._clock.monotonic_ns(),
                    outcome=_OUTCOMES[result.outcome],
                    reason=result.reason,
                )
            )

    def _write(self, task: PushTask, copies: PartCopies, start: int, end: int) -> TransferResult:
        with self._changed:
            failed = self._failed.get(task.seq)
        if failed is not None:
            return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=f"an earlier part failed: {failed}")
        try:
            cells = [task.peer.num_blocks + task.grant.slot]
            if task.role in {Role.KEY, Role.VALUE}:
                cells += self._blocks_there(task, copies, start, end)
            grant = WriteGrant(lock_cell=cells[0], cells=tuple(cells), generation=task.grant.generation)
            remote = task.peer.regions[copies.part.dst_rank]
            deadline = self._clock.monotonic() + WRITE_TIMEOUT_S
            num_bytes = 0
            for runs, source in self._writes(task, copies, start, end):
                result = remote.write(runs, source, grant, deadline)
                num_bytes += result.nbytes
                if result.outcome is not Outcome.DONE:
                    return msgspec.structs.replace(result, nbytes=num_bytes)
            return TransferResult(outcome=Outcome.DONE, nbytes=num_bytes)
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing is being written, and the receiver must hear of it
            return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=f"{type(error).__name__}: {error}")

    def _blocks_there(self, task: PushTask, copies: PartCopies, start: int, end: int) -> list[int]:
        """The destination's blocks that hold the tokens."""
        part, size = copies.part, self._block_size
        blocks = range(start // size, (end - 1) // size + 1)
        return [task.grant.block_ids[b // part.modulus] for b in blocks if b % part.modulus == part.residue]

    def _writes(
        self, task: PushTask, copies: PartCopies, start: int, end: int
    ) -> Iterable[tuple[Sequence[Run], Region]]:
        """The runs of one part with the region that they read: ours, unless a failpoint says otherwise."""
        if task.role not in {Role.KEY, Role.VALUE}:
            runs = _bind_state(task, copies)
            zeroed = bool(self._faults) and self._faults.is_zeroed(copies.part, None)
            yield self._faults.zeroed(runs) if zeroed else (runs, self._region)
        elif not self._faults:
            yield self._bind_tokens(task.block_ids, task, copies, (start, end)), self._region
        else:
            sources = self._faults.source_ids(copies.part, task.block_ids)
            for block in range(start // self._block_size, (end - 1) // self._block_size + 1):
                low, high = block * self._block_size, (block + 1) * self._block_size
                runs = self._bind_tokens(sources, task, copies, (max(start, low), min(end, high)))
                if runs:
                    zeroed = self._faults.is_zeroed(copies.part, block)
                    yield self._faults.zeroed(runs) if zeroed else (runs, self._region)

    def _bind_tokens(
        self, block_ids: Sequence[int], task: PushTask, copies: PartCopies, tokens: tuple[int, int]
    ) -> list[Run]:
        part = copies.part
        there = task.grant.block_ids
        where = extents(block_ids, there, *tokens, self._block_size, modulus=part.modulus, residue=part.residue)
        return [
            run
            for template in copies.templates
            if isinstance(template, PagedTemplate)
            for run in bind_extents(template, where)
        ]


def _bind_state(task: PushTask, copies: PartCopies) -> list[Run]:
    return [
        run
        for template in copies.templates
        if isinstance(template, SlotTemplate)
        for run in bind_slot(template, task.slot, task.grant.slot)
    ]
