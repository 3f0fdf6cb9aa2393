"""The verb `pull`: a decode worker reads a request's cache from the prefill ranks, and tells the broker shard by shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from common.bus.errors import BusError
from common.bus.handoff_events import HandoffEvents
from common.bus.port import Bus
from common.bus.rpc import RefusedError, UnansweredError
from common.engine.port import EngineDeadError, PullResult
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.runtime.trace import within
from common.worker.core.doubts import Connection
from common.worker.core.sequence import Sequence
from common.worker.replica import Replica
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.events import EventName
from contracts.handoff import PartsAnswer, PullHandoff
from contracts.manifest import RankManifest, Role
from contracts.pull import PullEnded, ShardPull, ShardState
from contracts.rank_pull import PullReport, PullShards, ShardPulled
from contracts.requests import WorkerRef
from services.decode.core.judged_shards import judge_shards
from services.decode.core.link_refusal import refuse_unlinked
from services.decode.core.pulled_parts import PulledParts
from services.decode.core.source_check import refuse_source
from services.decode.pull_metrics import PullMetrics
from services.decode.sources import Sources

MAX_PULLS: Final = 4096
"""Pulls under way at the same time; there are no more than slots, and those that a release has given up."""

_REPORT_EVERY_S: Final = 0.005
_TELL_AFTER_S: Final = 1.0


@dataclass(kw_only=True)
class Pull:
    """What is known of one request that pulls `roles` from `source`.

    One pull at a time: `lock` is the number of the last one that was begun. `linking` is the wait of the newest delivery of a command
    while its source is not linked. `untold` are events: they are published after the takeover, or when they are a second old, because
    each costs the machine that it runs on.
    """

    sequence: Sequence
    source: WorkerRef
    roles: tuple[Role, ...]
    parts: PulledParts
    linking: asyncio.Timeout | None = None
    lock: int = -1
    parallel: bool = True
    began_ns: int = 0
    is_under_way: bool = False
    ended: PullEnded | None = None
    untold: list[Callable[[], object]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether all that was to be pulled is in its place."""
        return self.ended is not None and self.ended.error is None and not self.is_under_way

    def stop_waiting(self) -> None:
        """End the wait for the link, if somebody waits for it."""
        linking, self.linking = self.linking, None
        if linking is not None:
            linking.reschedule(asyncio.get_running_loop().time())


class Deliver(Protocol):
    """Tells the broker of an end, in the background, until it is heard or the deadline passes."""

    def __call__(self, report: PullEnded, deadline: Deadline) -> None:
        """Begin to."""
        ...


@dataclass(kw_only=True)
class PullPorts:
    """What pulls need of the worker that they live in."""

    own: WorkerRef
    bus: Bus
    clock: Clock
    log: Log
    metrics: Metrics
    events: HandoffEvents
    group: asyncio.TaskGroup
    sources: Sources
    deliver: Deliver
    is_parallel: Callable[[], bool]


class Pulls:
    """The requests of a decode worker that pull something, from their reservation until their end."""

    def __init__(self, ports: PullPorts) -> None:
        self._ports = ports
        self._counted = PullMetrics(ports.metrics)
        self._tasks = BoundedTasks(ports.group, name="pull", limit=MAX_PULLS)
        self._pulls: dict[str, Pull] = {}
        self._unreported: dict[tuple[str, int], None] = {}
        self._has_unreported = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pulls)

    def expect(self, sequence: Sequence, source: WorkerRef, roles: tuple[Role, ...]) -> None:
        """A reservation of which `roles` will be pulled from `source`."""
        parts = PulledParts(sequence.handoff_id, self._ports.own.incarnation)
        self._pulls[sequence.handoff_id] = Pull(sequence=sequence, source=source, roles=roles, parts=parts)

    def get(self, handoff_id: str) -> Pull | None:
        """What is known of a request that pulls."""
        return self._pulls.get(handoff_id)

    async def begin(self, command: PullHandoff, sequence: Sequence, replica: Replica, block_size: int) -> None:
        """Begin the pull of a command, unless it has been. Raises `RefusedError`; nothing was begun then.

        The same command may be delivered again while its source is being linked. Then the delivery before ends with
        `UnansweredError`: the newest is the one that is still listened to, and no more than one waits for each handoff.
        """
        handoff_id = command.handoff_id
        pull = self._pulls.get(handoff_id)
        if pull is None:
            raise RefusedError(handoff_id, ErrorCode.PROTOCOL, f"{handoff_id} was reserved to be pushed, not pulled")
        deadline = Deadline.from_remaining_ms(self._ports.clock, command.timeout_ms)
        if command.lock == pull.lock:
            return
        self._check(command, pull)
        layout = await self._linked(command, pull, deadline)
        if self._pulls.get(handoff_id) is not pull:
            raise _released(handoff_id)
        if command.lock == pull.lock:
            return  # another delivery found the link a moment sooner
        self._check(command, pull)
        broken = refuse_source(command.source, pull.source, layout, sequence.num_prompt_tokens, block_size)
        if broken is not None:
            raise RefusedError(handoff_id, ErrorCode.PROTOCOL, broken)
        before = pull.lock
        pull.lock, pull.parallel, pull.ended = command.lock, self._ports.is_parallel(), None
        pull.began_ns = self._ports.clock.monotonic_ns()
        pull.parts.begin(command.source.dp_rank)
        pull.is_under_way = True
        work = partial(self._run, pull, command, replica, deadline)
        if not self._tasks.try_start(work):
            pull.lock, pull.is_under_way = before, False
            raise RefusedError(handoff_id, ErrorCode.OVERLOADED, "too many pulls are under way")

    async def _linked(self, command: PullHandoff, pull: Pull, deadline: Deadline) -> RankManifest:
        """Wait for the link in place of whoever waits for it now. Raises `RefusedError`, and `UnansweredError` once replaced itself."""
        handoff_id = command.handoff_id
        pull.stop_waiting()
        linking = pull.linking = asyncio.timeout(None)
        try:
            async with linking:
                return await self._ports.sources.linked(pull.source, deadline)
        except EngineDeadError:
            raise
        except PdmeshError as error:
            own_id, source_id = self._ports.own.worker_id, pull.source.worker_id
            refusal = refuse_unlinked(error.info, own_id, source_id, is_late=deadline.passed)
            raise RefusedError(handoff_id, refusal.code, refusal.message) from error
        except TimeoutError as error:
            if self._pulls.get(handoff_id) is not pull:
                raise _released(handoff_id) from error
            raise UnansweredError(f"{handoff_id} was asked to be pulled once more") from error
        finally:
            if pull.linking is linking:
                pull.linking = None

    def answer(self, handoff_id: str) -> PartsAnswer:
        """All that was pulled of a request so far."""
        pull = self._pulls.get(handoff_id)
        if pull is None:
            return PartsAnswer(handoff_id=handoff_id, reports=())
        return PartsAnswer(handoff_id=handoff_id, reports=pull.parts.reports(), pull_ended=pull.ended)

    def end(self, handoff_id: str) -> None:
        """The request is over here. What is still being read has been waited for, or its memory is in quarantine."""
        pull = self._pulls.pop(handoff_id, None)
        if pull is not None:
            pull.stop_waiting()
            self._tell(pull)

    def taken_over(self, handoff_id: str) -> None:
        """The request decodes: there is time to tell people of the pull."""
        pull = self._pulls.get(handoff_id)
        if pull is not None:
            self._tell(pull)

    async def run_reports(self) -> None:
        """Send what has arrived, a little at a time. What a pull ends with has been sent at once."""
        while True:
            await self._has_unreported.wait()
            self._has_unreported.clear()
            for handoff_id, source_rank in tuple(self._unreported):
                await self._report(handoff_id, source_rank)
            await self._ports.clock.sleep(_REPORT_EVERY_S)

    async def run_events(self) -> None:
        """Publish the events of pulls that take long, so that one that is stuck can be seen."""
        while True:
            await self._ports.clock.sleep(_TELL_AFTER_S)
            old_ns = self._ports.clock.monotonic_ns() - int(_TELL_AFTER_S * 1e9)
            for pull in self._pulls.values():
                if pull.began_ns < old_ns:
                    self._tell(pull)

    def _check(self, command: PullHandoff, pull: Pull) -> None:
        handoff_id = command.handoff_id
        if pull.sequence.output_ids:
            raise RefusedError(handoff_id, ErrorCode.PROTOCOL, f"{handoff_id} has been taken over already")
        if command.lock < pull.lock:
            rule = f"lock: {command.lock} is not allowed; the rule is: {pull.lock} or more"
            raise RefusedError(handoff_id, ErrorCode.STALE_FENCE, rule)
        if pull.is_under_way:
            text = f"lock: {command.lock} has to wait: {handoff_id} is being pulled under {pull.lock}"
            raise RefusedError(handoff_id, ErrorCode.DUPLICATE, text)
        if pull.is_done:
            raise RefusedError(handoff_id, ErrorCode.PROTOCOL, f"{handoff_id} was pulled under lock {pull.lock}")

    async def _run(self, pull: Pull, command: PullHandoff, replica: Replica, deadline: Deadline) -> None:
        handoff_id = command.handoff_id
        shards = PullShards(
            seq=pull.sequence.seq,
            lock=command.lock,
            source=command.source,
            roles=pull.roles,
            num_cached_tokens=pull.sequence.num_cached_tokens,
            parallel=pull.parallel,
            timeout_ms=deadline.remaining_ms,
        )
        result: PullResult | None = None
        error: ErrorInfo | None = None
        try:
            result = await replica.engine.pull(shards, partial(self._observe, pull))
        except EngineDeadError:
            raise
        except PdmeshError as failure:
            error = failure.info
        else:
            error = result.error
            self._counted.count(result)
        link = Connection(peer=pull.source, own_dp_rank=pull.sequence.dp_rank, peer_dp_rank=command.source.dp_rank)
        self._ports.sources.note(judge_shards(link, () if result is None else result.shards, error))
        pull.is_under_way = False
        if self._pulls.get(handoff_id) is not pull:
            return  # released meanwhile: the broker knows more than we could tell it
        pull.ended = PullEnded(
            handoff_id=handoff_id,
            incarnation=self._ports.own.incarnation,
            lock=command.lock,
            wait_ms=0.0 if result is None else result.wait_ms,
            merges=() if result is None else result.merges,
            total_ms=(self._ports.clock.monotonic_ns() - pull.began_ns) / 1e6,
            parallel=pull.parallel,
            error=error,
        )
        self._note_merges(pull, pull.ended)
        with within(pull.sequence.trace):
            if error is not None:
                self._ports.log.error(
                    "pull_failed", handoff_id=handoff_id, error_code=error.code, error_message=error.message
                )
            for each, source_rank in tuple(self._unreported):
                if each == handoff_id:
                    await self._report(handoff_id, source_rank)
            self._ports.deliver(pull.ended, deadline)

    def _observe(self, pull: Pull, report: PullReport) -> None:
        """Note a report of a rank. It must not raise, nor wait."""
        if report.lock != pull.lock:
            return
        handoff_id = pull.sequence.handoff_id
        for source_rank in pull.parts.add(report):
            self._unreported[handoff_id, source_rank] = None
            self._has_unreported.set()
        if isinstance(report, ShardPulled):
            self._note(pull, report.shard)

    def _note(self, pull: Pull, shard: ShardPull) -> None:
        """Keep the event of a shard, to be told later."""
        if shard.state is ShardState.WAITING:
            return
        began = shard.state is ShardState.PULLING
        ended_ns = shard.started_ns + int(shard.duration_ms * 1e6) if shard.started_ns else None
        error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=shard.reason) if shard.reason else None
        pull.untold.append(
            partial(
                self._ports.events.publish,
                EventName.SHARD_PULL_STARTED if began else EventName.SHARD_PULLED,
                handoff_id=pull.sequence.handoff_id,
                request_id=pull.sequence.request_id,
                phase="pull",
                at_ns=shard.started_ns if began else ended_ns,
                started_ns=shard.started_ns or None,
                duration_ms=None if began else shard.duration_ms,
                num_bytes=None if began else shard.num_bytes,
                shard_state=None if began else str(shard.state),
                lock=pull.lock,
                parallel=pull.parallel,
                source_rank=shard.source_rank,
                destination_rank=shard.destination_rank,
                destination_dp_rank=pull.sequence.dp_rank,
                error=error,
            )
        )

    def _note_merges(self, pull: Pull, ended: PullEnded) -> None:
        """Keep an event for each role that was merged, to be told later."""
        now_ns = self._ports.clock.monotonic_ns()
        pull.untold += [
            partial(
                self._ports.events.publish,
                EventName.SHARDS_MERGED,
                handoff_id=pull.sequence.handoff_id,
                request_id=pull.sequence.request_id,
                phase="pull",
                at_ns=now_ns,
                duration_ms=merge.merge_ms,
                merge_ms=merge.merge_ms,
                wait_ms=ended.wait_ms,
                role=merge.role,
                lock=pull.lock,
                parallel=pull.parallel,
                destination_dp_rank=pull.sequence.dp_rank,
            )
            for merge in ended.merges
        ]

    def _tell(self, pull: Pull) -> None:
        untold, pull.untold = pull.untold, []
        with within(pull.sequence.trace):
            for publish in untold:
                publish()

    async def _report(self, handoff_id: str, source_rank: int) -> None:
        self._unreported.pop((handoff_id, source_rank), None)
        pull = self._pulls.get(handoff_id)
        if pull is None:
            return
        with within(pull.sequence.trace):
            try:
                await self._ports.bus.publish(subjects.parts(handoff_id), encode(pull.parts.report(source_rank)))
            except BusError as error:  # the broker asks for the parts when it misses some
                self._ports.log.info("parts_report_lost", handoff_id=handoff_id, error_code=error.code)


def _released(handoff_id: str) -> RefusedError:
    return RefusedError(handoff_id, ErrorCode.CANCELLED, f"{handoff_id} was released meanwhile")
