"""The threads of a rank that read shards from source ranks, and the merge of states once all shards of a pull are there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from common.dataplane.port import Outcome, RemoteRegion, TransferResult
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.merge import copy_within
from common.engine.transfer.pull_read import PullTarget, Shard, pulled_part, pulled_parts, read_shard, shards_of
from common.engine.transfer.push_faults import PushFaults
from common.layout.staging import STAGED_ROLES
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.pull import ShardPull, ShardState
from contracts.rank_pull import PulledPart, PullReport, PullStopped, RoleMerged, ShardPulled

MAX_THREADS: Final = 16
"""Threads that read, for all pulls of a rank; further shards wait for one."""
JOIN_TIMEOUT_S: Final = 5.0


class _Pull:
    """One pull at this rank. It is over when no shard is left and the merge, if there is one, is done."""

    def __init__(self, target: PullTarget, shards: list[Shard], started_ns: int, deadline: float) -> None:
        self.target: Final = target
        self.waiting: Final = deque(shards)
        self.num_left = self.num_shards = len(shards)
        self.started_ns: Final = started_ns
        self.deadline: Final = deadline
        self.stop: Final = threading.Event()
        """Set when the sequence is released: nothing more of it begins."""
        self.error: ErrorInfo | None = None
        self.arrived: Final[list[Shard]] = []
        self.unsettled: Final[list[RemoteRegion]] = []
        """Regions whose transport could not say that a read has stopped."""
        self.is_quiet = False
        """Nothing is read or merged any more; its end may not have been told yet."""
        self.is_over = False
        """It has been told."""

    @property
    def lock(self) -> int:
        """Its number among the pulls of its sequence."""
        return self.target.command.lock

    def refusal(self) -> ErrorInfo | None:
        """Why no shard of it may begin, and nothing may be merged."""
        if self.stop.is_set():
            seq = self.target.command.seq
            return ErrorInfo(code=ErrorCode.CANCELLED, message=f"sequence {seq} was released")
        return self.error


class Puller:
    """Reads the shards of pulls, side by side or one after the other. Reports go to `emit`, from the threads and from the caller's.

    `begin`, `drop`, `wait_idle` and `close` are for the rank's thread; only `wait_idle` and `close` wait. Whatever goes wrong in a
    thread fails the pull that it was busy with, and the thread goes on with the others.
    """

    def __init__(
        self, *, rank: int, clock: Clock, emit: Callable[[PullReport], None], faults: PushFaults, shaper: LinkShaper
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._emit = emit
        self._faults = faults
        self._shaper = shaper
        self._changed = threading.Condition()
        self._pulls: dict[int, _Pull] = {}
        self._ready: deque[tuple[_Pull, Shard]] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def num_pulls(self) -> int:
        """Pulls that are not over."""
        with self._changed:
            return sum(not pull.is_over for pull in self._pulls.values())

    def begin(self, target: PullTarget) -> None:
        """Begin a pull and return. Every shard of it is reported as waiting, before any is read.

        Raises `InvalidValueError` for a lock number that is not above the last one of the sequence, and while its last pull goes on;
        and `RuntimeError` where no thread can be started and none is there: then nothing has begun.
        """
        command = target.command
        now, started_ns = self._clock.monotonic(), self._clock.monotonic_ns()
        pull = _Pull(target, shards_of(target, self._faults), started_ns, now + command.timeout_ms / 1000)
        with self._changed:
            last = self._pulls.get(command.seq)
            if last is not None and command.lock <= last.lock:
                raise InvalidValueError(field="lock", value=command.lock, rule=f"above {last.lock}, the last one")
            if last is not None and not last.is_quiet:
                raise InvalidValueError(
                    field="lock", value=command.lock, rule=f"one pull at a time, and {last.lock} goes on"
                )
            self._pulls[command.seq] = pull
            self._announce(pull)
            for _ in range(len(pull.waiting) if command.parallel else min(1, len(pull.waiting))):
                self._ready.append((pull, pull.waiting.popleft()))
            try:
                self._start_threads()
            except RuntimeError:
                self._withdraw(pull, last)
                raise
        if not pull.num_shards:
            self._conclude(pull)  # not by what is left: whoever has read the last shard meanwhile has concluded it

    def drop(self, seqs: Iterable[int]) -> None:
        """Give up the pulls of sequences: what has not begun never does. What is under way goes on: see `wait_idle`."""
        for seq in seqs:
            with self._changed:
                pull = self._pulls.get(seq)
                if pull is None:
                    continue
                pull.stop.set()
                dropped = [shard for owner, shard in self._ready if owner is pull]
                dropped += pull.waiting
                pull.waiting.clear()
                self._ready = deque(item for item in self._ready if item[0] is not pull)
            for shard in dropped:
                self._skip(pull, shard)
            self._count(pull, len(dropped))

    def wait_idle(self, seq: int, deadline: float) -> bool:
        """Whether nothing is written into the memory of `seq` any more; waits for it until `deadline`. To be called after `drop`.

        False also while a transport cannot tell that a read has stopped, and its peer lives.
        """
        with self._changed:
            pull = self._pulls.get(seq)
            if pull is None:
                return True
            remaining = max(0.0, deadline - self._clock.monotonic())
            if not self._changed.wait_for(lambda: pull.is_over, remaining):
                return False
            if any(region.peer_alive for region in pull.unsettled):
                return False
            del self._pulls[seq]
            return True

    def close(self) -> None:
        """Give everything up and end the threads, within a bound. Idempotent."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            for pull in self._pulls.values():
                pull.stop.set()
                pull.waiting.clear()
            threads = tuple(self._threads)
        deadline = self._clock.monotonic() + JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _announce(self, pull: _Pull) -> None:
        """Report that all shards of a pull wait. To be called under the lock: no thread may say before that it reads one."""
        for shard in pull.waiting:
            at = ShardPull(source_rank=shard.src_rank, destination_rank=self._rank, state=ShardState.WAITING)
            self._report(pull, at)

    def _start_threads(self) -> None:
        """As many as there are shards to begin with. To be called under the lock."""
        for _ in range(min(len(self._ready), MAX_THREADS - len(self._threads))):
            thread = threading.Thread(target=self._work, name=f"puller-{self._rank}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if self._threads:
                    return  # those that are there take everything in turn
                raise
            self._threads.add(thread)

    def _withdraw(self, pull: _Pull, last: _Pull | None) -> None:
        """As if a pull had never been asked for, and `last` were the last one. To be called under the lock."""
        self._ready = deque(item for item in self._ready if item[0] is not pull)
        seq = pull.target.command.seq
        if last is None:
            del self._pulls[seq]
        else:
            self._pulls[seq] = last

    def _work(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._perform(*item)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> tuple[_Pull, Shard] | None:
        with self._changed:
            if self._ready and not self._closed:
                return self._ready.popleft()
            # In the same breath: a shard that becomes ready after this starts a thread of its own.
            self._threads.discard(threading.current_thread())
            return None

    def _perform(self, pull: _Pull, shard: Shard) -> None:
        try:
            with self._changed:
                refused = pull.refusal()
            if refused is None:
                self._read(pull, shard)
            else:
                self._skip(pull, shard)
        except Exception as error:  # noqa: BLE001 - the parent waits for the end of this pull, and other pulls for this thread
            self._fail(pull, shard, error)
        finally:
            with self._changed:
                if pull.waiting and not self._closed:
                    self._ready.append((pull, pull.waiting.popleft()))
                    # This thread takes it, or one that is free before.
            self._count(pull, 1)

    def _read(self, pull: _Pull, shard: Shard) -> None:
        """Read one shard and report it. Its time includes what failpoints add."""
        began, began_ns = self._clock.monotonic(), self._clock.monotonic_ns()
        at = ShardPull(
            source_rank=shard.src_rank, destination_rank=self._rank, state=ShardState.PULLING, started_ns=began_ns
        )
        self._report(pull, at)
        pull.stop.wait(max((self._faults.delay_s(part) for part in shard.parts), default=0.0))
        result = read_shard(shard, pull.target, self._faults, pull.deadline)
        if result.outcome is Outcome.INDETERMINATE:
            with self._changed:
                pull.unsettled.append(pull.target.source.regions[shard.src_rank])
        over_at = self._shaper.over_at(shard.src_rank, self._rank, result.nbytes, began)
        pull.stop.wait(max(0.0, min(over_at, pull.deadline) - self._clock.monotonic()))
        if over_at > pull.deadline and result.outcome is Outcome.DONE:
            result = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="the deadline has passed")
        is_done = result.outcome is Outcome.DONE
        with self._changed:
            if is_done:
                pull.arrived.append(shard)
            elif pull.error is None:
                pull.error = _failure(shard, result)
        ended = ShardPull(
            source_rank=shard.src_rank,
            destination_rank=self._rank,
            state=ShardState.DONE if is_done else ShardState.FAILED,
            num_bytes=result.nbytes if is_done else 0,
            started_ns=began_ns,
            duration_ms=(self._clock.monotonic_ns() - began_ns) / 1e6,
            reason=result.reason,
            is_stale=result.is_stale,
        )
        self._report(pull, ended, pulled_parts(shard, pull.target) if is_done else ())

    def _fail(self, pull: _Pull, shard: Shard, error: Exception) -> None:
        """Report a shard that ended before anybody could say how: it has failed, whatever of it has been read."""
        reason = reason_of(error, f"pulling a shard of source rank {shard.src_rank}")
        result = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=reason)
        with self._changed:
            pull.error = pull.error or _failure(shard, result)
        shown = ShardPull(
            source_rank=shard.src_rank,
            destination_rank=self._rank,
            state=ShardState.FAILED,
            started_ns=pull.started_ns,
            duration_ms=(self._clock.monotonic_ns() - pull.started_ns) / 1e6,
            reason=reason,
        )
        self._report(pull, shown)

    def _skip(self, pull: _Pull, shard: Shard) -> None:
        """Report a shard that does not begin."""
        with self._changed:
            why = pull.refusal()
        shown = ShardPull(
            source_rank=shard.src_rank,
            destination_rank=self._rank,
            state=ShardState.FAILED,
            reason=f"not begun: {why.message if why is not None else 'the rank is ending'}",
        )
        self._report(pull, shown)

    def _count(self, pull: _Pull, num_shards: int) -> None:
        """Some shards of a pull are over. Whoever ends the last one merges."""
        with self._changed:
            pull.num_left -= num_shards
            is_last = num_shards > 0 and pull.num_left == 0
        if is_last:
            self._conclude(pull)

    def _conclude(self, pull: _Pull) -> None:
        """All shards are over: merge unless one failed, and say that the pull has stopped."""
        try:
            error = self._verdict(pull)
        except Exception as failure:  # noqa: BLE001 - the parent waits for the end of the pull, whatever it is
            reason = reason_of(failure, f"merging what was pulled of sequence {pull.target.command.seq}")
            error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=f"merge: {reason}")
        command = pull.target.command
        with self._changed:
            pull.is_quiet = True  # before it is told: whoever hears of it may begin with the next one at once
        self._tell(
            pull,
            PullStopped(
                rank=self._rank,
                seq=command.seq,
                lock=command.lock,
                started_ns=pull.started_ns,
                ended_ns=self._clock.monotonic_ns(),
                error=error,
            ),
        )
        with self._changed:
            pull.is_over = True
            self._changed.notify_all()

    def _verdict(self, pull: _Pull) -> ErrorInfo | None:
        """Merge, unless something has failed; what has."""
        with self._changed:
            error = pull.refusal()
            num_missing = pull.num_shards - len(pull.arrived)
        if error is None and num_missing:
            error = ErrorInfo(code=ErrorCode.INTERNAL, message=f"{num_missing} shards ended in an unknown way")
        if error is None:
            self._merge(pull)
            error = pull.error
        return error

    def _merge(self, pull: _Pull) -> None:
        """Bring the states of each role out of the staging row into the slot, copy by copy of the plan."""
        target = pull.target
        command, states = target.command, target.source.states
        for role in STAGED_ROLES:
            parts = [part for shard in pull.arrived for part in shard.states if part.role is role]
            if not parts:
                continue
            began_ns = self._clock.monotonic_ns()
            runs = states.merges(frozenset(parts), target.binding.slot, target.row_base)
            copy_within(target.region.data, runs)
            self._tell(
                pull,
                RoleMerged(
                    rank=self._rank,
                    seq=command.seq,
                    lock=command.lock,
                    role=role,
                    merge_ms=(self._clock.monotonic_ns() - began_ns) / 1e6,
                    parts=tuple(pulled_part(part) for part in sorted(parts)),
                ),
            )

    def _report(self, pull: _Pull, shard: ShardPull, parts: tuple[PulledPart, ...] = ()) -> None:
        command = pull.target.command
        self._tell(pull, ShardPulled(rank=self._rank, seq=command.seq, lock=command.lock, shard=shard, parts=parts))

    def _tell(self, pull: _Pull, report: PullReport) -> None:
        """Report. What cannot be told fails the pull, and ends no thread: the rank is ending, or its parent stands still."""
        try:
            self._emit(report)
        except Exception as error:  # noqa: BLE001 - see above
            text = f"a report was lost: {reason_of(error, 'reporting a pull')}"
            with self._changed:
                pull.error = pull.error or ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=text)


def _failure(shard: Shard, result: TransferResult) -> ErrorInfo:
    reason = result.reason or result.outcome.value
    return ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=f"shard of source rank {shard.src_rank}: {reason}")
