"""The pulls that an engine knows of: what its ranks have reported, and the answer to whoever asks for the same one again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from common.engine.port import EngineDeadError, EngineError, PullResult
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.manifest import Role
from contracts.pull import RoleMerge, ShardPull, ShardState
from contracts.rank_pull import PullReport, PullShards, PullStopped, RoleMerged, ShardPulled

Observe = Callable[[PullReport], None]


class Pulling:
    """One pull, from its beginning until its sequence is released. `ended` has a result once every rank has stopped."""

    def __init__(self, command: PullShards, num_ranks: int) -> None:
        self.command: Final = command
        self.ended: Final[asyncio.Future[PullResult]] = asyncio.get_running_loop().create_future()
        self._num_ranks = num_ranks
        self._reports: list[PullReport] = []
        self._observers: list[Observe] = []

    @property
    def is_ended(self) -> bool:
        """Whether it is known what came of it."""
        return self.ended.done()

    def tell(self, observe: Observe) -> None:
        """Report to one more observer, from the beginning on."""
        for report in self._reports:
            observe(report)
        self._observers.append(observe)

    def put(self, report: PullReport) -> None:
        """Take one report."""
        self._reports.append(report)
        for observe in self._observers:
            observe(report)
        if not self.silent_ranks() and not self.ended.done():
            self.ended.set_result(self._result())

    def silent_ranks(self) -> list[int]:
        """The ranks that have not stopped yet."""
        return sorted(set(range(self._num_ranks)) - {report.rank for report in self._of(PullStopped)})

    def fail(self, error: PdmeshError) -> None:
        """Nobody will report any more. Twice is fine."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # the caller may have gone; a failure that nobody awaits is no news then

    def _of(self, kind: type[PullStopped]) -> list[PullStopped]:
        return [report for report in self._reports if isinstance(report, kind)]

    def _result(self) -> PullResult:
        shards: dict[tuple[int, int], ShardPull] = {}
        begun: set[tuple[int, int]] = set()
        merges: dict[Role, float] = {}
        for report in self._reports:
            match report:
                case ShardPulled(shard=shard):
                    key = shard.source_rank, shard.destination_rank
                    shards[key] = shard
                    if shard.state is ShardState.PULLING:
                        begun.add(key)
                case RoleMerged(role=role, merge_ms=merge_ms):
                    merges[role] = max(merge_ms, merges.get(role, 0.0))
                case PullStopped():
                    pass
        stops = sorted(self._of(PullStopped), key=lambda stop: stop.rank)
        first_ns = min((shards[key].started_ns for key in begun), default=0)
        last_ns = max((shards[key].started_ns + shards[key].duration_ms * 1e6 for key in begun), default=0.0)
        return PullResult(
            shards=tuple(shards[key] for key in sorted(shards)),
            merges=tuple(RoleMerge(role=role, merge_ms=merges[role]) for role in sorted(merges)),
            num_bytes=sum(shard.num_bytes for shard in shards.values()),
            wait_ms=(last_ns - first_ns) / 1e6,
            total_ms=(max(stop.ended_ns for stop in stops) - min(stop.started_ns for stop in stops)) / 1e6,
            parallel=self.command.parallel,
            error=_verdict([stop.error for stop in stops if stop.error is not None], self._num_ranks),
        )


class Pulls:
    """One pull a sequence: the last one. Numbers of the request's lock order them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pulls: dict[int, Pulling] = {}

    def begin(self, command: PullShards, observe: Observe) -> tuple[Pulling, bool]:
        """The pull with the command's number, and whether it is a new one, which its caller has to perform.

        Raises `EngineError` for a number below the last, and for another one while the last is under way.
        """
        known = self._pulls.get(command.seq)
        if known is not None and command.lock < known.command.lock:
            text = f"lock: {command.lock} is not allowed; the rule is: {known.command.lock} or more for sequence {command.seq}"
            raise EngineError(text, code=ErrorCode.STALE_FENCE)
        if known is not None and command.lock == known.command.lock:
            known.tell(observe)
            return known, False
        if known is not None and not known.is_ended:
            text = f"sequence {command.seq} is still being pulled under lock {known.command.lock}"
            raise EngineError(text, code=ErrorCode.PROTOCOL)
        pulling = self._pulls[command.seq] = Pulling(command, self._num_ranks)
        pulling.tell(observe)
        return pulling, True

    def put(self, report: PullReport) -> None:
        """Take a report; one of a pull that is not known any more is dropped."""
        pulling = self._pulls.get(report.seq)
        if pulling is not None and pulling.command.lock == report.lock:
            pulling.put(report)

    def refuse(self, pulling: Pulling, error: PdmeshError) -> None:
        """The ranks would not begin with it: the same number may be tried again."""
        if self._pulls.get(pulling.command.seq) is pulling:
            del self._pulls[pulling.command.seq]
        pulling.fail(error)

    def forget(self, seqs: Iterable[int]) -> None:
        """These sequences have been released. Whoever still waits for a pull of one is told so."""
        for seq in seqs:
            pulling = self._pulls.pop(seq, None)
            if pulling is not None:
                pulling.fail(EngineError(f"sequence {seq} was released", code=ErrorCode.CANCELLED))

    def die(self, reason: str) -> None:
        """There will be no reports any more: whoever waits for a pull gets `EngineDeadError`."""
        for pulling in self._pulls.values():
            pulling.fail(EngineDeadError(reason))
        self._pulls.clear()


def _verdict(errors: list[ErrorInfo], num_ranks: int) -> ErrorInfo | None:
    """One error for all: the first rank's, and how many ranks had one when it was not all of them."""
    if not errors:
        return None
    share = "" if len(errors) == num_ranks else f" (on {len(errors)} of {num_ranks} ranks)"
    return ErrorInfo(code=errors[0].code, message=errors[0].message + share, param=errors[0].param)
