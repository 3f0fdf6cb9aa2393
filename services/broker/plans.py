"""What a prefill worker owes a decode worker: compiled when the two are first named together, kept while both live."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from common.layout.planner import plan
from common.runtime.clock import Clock, Deadline
from common.runtime.offload import Offload
from contracts import subjects
from contracts.errors import ErrorCode, PdmeshError
from contracts.manifest import PlannedPart, RankManifest
from contracts.requests import DisaggregatedRoute, MixedRoute, Refused, Route, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeRefused, DescribeWorker, WorkerDescription, WorkerRole
from services.broker.calls import Calls
from services.broker.core.link_verdicts import LinkVerdicts


class PairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of every handoff from one start of a prefill worker to one start of a decode worker."""

    planned: tuple[PlannedPart, ...]
    block_size: int


_NOTHING: Final = PairPlan(planned=(), block_size=1)

Pair = tuple[WorkerRef, WorkerRef]


@dataclass(slots=True, eq=False)
class _Meeting:
    """A pair that is being described, one after the other for all who ask. What came of it is kept unless a worker left meanwhile."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0
    is_dropped: bool = False


class Plans:
    """The plans of all pairs. A refusal is kept like a plan: nothing about the pair changes until one of them restarts."""

    def __init__(self, calls: Calls, clock: Clock, *, timeout_s: float, offload: Offload = asyncio.to_thread) -> None:
        self._calls = calls
        self._clock = clock
        self._timeout_s = timeout_s
        self._offload = offload
        self._manifests: dict[WorkerRef, tuple[RankManifest, ...]] = {}
        self._plans: dict[Pair, PairPlan | PdmeshError] = {}
        self._meetings: dict[Pair, _Meeting] = {}
        self.verdicts = LinkVerdicts()
        """What `PD_LINKS` says of pairs: who watches it feeds this."""

    @property
    def num_pairs(self) -> int:
        """How many pairs have been compiled or refused."""
        return len(self._plans)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept, of any pair or worker."""
        return not (self._plans or self._manifests or self._meetings)

    async def for_route(self, route: Route, deadline: Deadline, *, under_way: bool = False) -> PairPlan:
        """What is owed on a route: nothing on a mixed one, where nothing is handed over. Raises what `between` raises."""
        match route:
            case DisaggregatedRoute(prefill=prefill, decode=decode):
                return await self.between(prefill, decode, deadline, under_way=under_way)
            case MixedRoute():
                return _NOTHING

    async def between(
        self, prefill: WorkerRef, decode: WorkerRef, deadline: Deadline, *, under_way: bool = False
    ) -> PairPlan:
        """The pair's plan; for a handoff that is `under_way` also while the pair is being unlinked, which waits for it.

        Raises INCOMPATIBLE_WORKERS naming the rule, DRAINING, INCARNATION_CHANGED, TRANSFER_FAILED for a pair that does not describe
        itself while the deadline is still far, and what `Calls.ask` raises.
        """
        pair = (prefill, decode)
        if not under_way:
            self.verdicts.check(prefill, decode, subjects.link_key(prefill.worker_id, decode.worker_id))
        try:
            found = self._plans.get(pair) or await self._met(pair, deadline)
        except TimeoutError as error:
            raise _late(pair, deadline) from error
        except PdmeshError as error:
            raise (_late(pair, deadline) if error.code is ErrorCode.DEADLINE_EXCEEDED else error) from error
        if isinstance(found, PdmeshError):
            raise PdmeshError(found.message, code=found.code, param=found.param)
        return found

    def drop(self, worker: WorkerRef) -> None:
        """Forget everything about one start of a worker, also what is being found out now."""
        self.verdicts.drop(worker)
        self._manifests.pop(worker, None)
        self._plans = {pair: kept for pair, kept in self._plans.items() if worker not in pair}
        for pair, meeting in self._meetings.items():
            if worker in pair:
                meeting.is_dropped = True
        self._meetings = {pair: meeting for pair, meeting in self._meetings.items() if worker not in pair}

    async def _met(self, pair: Pair, deadline: Deadline) -> PairPlan | PdmeshError:
        """What comes of describing a pair to each other; whoever waits for the same pair gets the same. Raises TimeoutError, too."""
        deadline = deadline.capped(
            self._timeout_s
        )  # to wait for others, too: nobody comes after many that fail one by one
        with self._meeting(pair) as meeting:
            async with deadline.timeout(), meeting.lock:
                found = self._plans.get(pair)
                if found is None:
                    found = await self._compile(pair, meeting, deadline)
                    if not meeting.is_dropped:
                        self._plans[pair] = found
        return found

    @contextmanager
    def _meeting(self, pair: Pair) -> Iterator[_Meeting]:
        """The pair's meeting, which is over when nobody waits for it any more: a router may name pairs that do not exist."""
        meeting = self._meetings.setdefault(pair, _Meeting())
        meeting.num_waiting += 1
        try:
            yield meeting
        finally:
            meeting.num_waiting -= 1
            if not meeting.num_waiting and self._meetings.get(pair) is meeting:
                del self._meetings[pair]

    async def _compile(self, pair: Pair, meeting: _Meeting, deadline: Deadline) -> PairPlan | PdmeshError:
        prefill, decode = pair
        source = await self._describe(WorkerRole.PREFILL, prefill, meeting, deadline)
        destination = await self._describe(WorkerRole.DECODE, decode, meeting, deadline)
        try:
            compiled = await self._offload(lambda: plan(source, destination))
        except PdmeshError as error:
            return error
        return PairPlan(planned=compiled.parts, block_size=source[0].block_size)

    async def _describe(
        self, role: WorkerRole, worker: WorkerRef, meeting: _Meeting, deadline: Deadline
    ) -> tuple[RankManifest, ...]:
        """The manifests of the ranks of replica 0, one message a rank: all replicas of a worker are laid out alike."""
        if worker in self._manifests:
            return self._manifests[worker]
        subject = subjects.worker_rpc(role, worker.worker_id, WorkerVerb.DESCRIBE)
        manifests: list[RankManifest] = []
        num_ranks = 1
        while len(manifests) < num_ranks:
            question = partial(DescribeWorker, rank=len(manifests))
            answer = await self._calls.ask(subject, question, WorkerDescription | DescribeRefused | Refused, deadline)
            if isinstance(answer, DescribeRefused | Refused):
                raise PdmeshError.from_info(answer.error)
            if answer.incarnation != worker.incarnation:
                text = f"{worker.worker_id} is {answer.incarnation} now, not {worker.incarnation}"
                raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
            manifests.append(answer.manifest)
            num_ranks = answer.manifest.coordinates.tp_size
        found = tuple(manifests)
        if not meeting.is_dropped:
            self._manifests[worker] = found
        return found


def _late(pair: Pair, deadline: Deadline) -> PdmeshError:
    """A request whose time is not over may be tried over another pair."""
    prefill, decode = pair
    text = f"{prefill.worker_id} and {decode.worker_id} were not described in time"
    return PdmeshError(text, code=ErrorCode.DEADLINE_EXCEEDED if deadline.passed else ErrorCode.TRANSFER_FAILED)
