"""Links with prefill workers that this worker pulls from: made when one appears, and awaited by whoever needs it sooner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from common.bus.heard import HeardTable
from common.bus.port import Bucket, Bus, Entry, Snapshot
from common.bus.refusals import Refusals
from common.bus.silence import Silence
from common.bus.storage import WORKER_TTL_S, ttl_on
from common.engine.port import EngineDeadError
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.worker.core.doubts import Doubts
from common.worker.describing import describe_worker
from common.worker.last_look import take_gone
from common.worker.replica_set import ReplicaSet
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.manifest import RankManifest
from contracts.requests import WorkerRef
from contracts.workers import WorkerRecord, WorkerRole
from services.decode.core.judged_shards import Judged
from services.decode.source_metrics import SourceMetrics, Standing

MAX_SOURCES: Final = 1024
"""Prefill workers that a decode worker links with; one more is refused by name."""

_LINK_S: Final = 70.0
_TICK_S: Final = 0.5


@dataclass(kw_only=True)
class _Source:
    """One start of a prefill worker. `done` is set whenever a try has ended; `refusal` is why the last one failed."""

    ref: WorkerRef
    is_linking: bool = False
    is_linked: bool = False
    refusal: ErrorInfo | None = None
    manifest: RankManifest | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_refused(self) -> bool:
        """Whether no further try of this start can help."""
        return self.refusal is not None and self.refusal.code is ErrorCode.INCOMPATIBLE_WORKERS

    @property
    def standing(self) -> Standing:
        """For people."""
        if self.is_linking or self.is_linked:
            return Standing.LINKING if self.is_linking else Standing.LINKED
        return Standing.REFUSED if self.is_refused else Standing.FAILED


class Sources:
    """Prefill workers by id. One try to link with each at a time; another start of one takes the place of the start before."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        refusals: Refusals,
        *,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        replicas: ReplicaSet,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._refusals = refusals
        self._replicas = replicas
        self._tasks = BoundedTasks(group, name="source", limit=2 * MAX_SOURCES)
        self._sources: dict[str, _Source] = {}
        self._metrics = SourceMetrics(metrics, self._num_of)
        self._heard: HeardTable[WorkerRecord] = HeardTable(ttl_s=ttl_on(bus, WORKER_TTL_S))
        self._doubts = Doubts()
        self._silence = Silence(bus, clock, ttl_s=WORKER_TTL_S)

    async def linked(self, ref: WorkerRef, deadline: Deadline) -> RankManifest:
        """Wait until `ref` can be read from; the layout of its first rank, which tells what a grant of it may name.

        Only the first try to link with a start is waited for. Where the last one has failed, another is begun and not waited for:
        whoever asks would pay for it, and is better served by another source meanwhile.

        Raises `PdmeshError`: INCOMPATIBLE_WORKERS with the rule that forbids the pair, what the last try failed with, or
        DEADLINE_EXCEEDED.
        """
        known = self._sources.get(ref.worker_id)
        if known is not None and known.ref != ref:
            text = f"{ref.worker_id} {ref.incarnation} is not its present start, which is {known.ref.incarnation}"
            raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
        source = self._source(ref)
        last = source.refusal
        if not source.is_linked and not source.is_linking and not source.is_refused:
            self._begin(source)
        if last is None and not source.is_linked:
            try:
                async with deadline.timeout():
                    await source.done.wait()
            except TimeoutError as error:
                text = f"{ref.worker_id} {ref.incarnation} could not be linked as a source in time"
                raise PdmeshError(text, code=ErrorCode.DEADLINE_EXCEEDED) from error
            last = source.refusal
        if last is not None:
            raise PdmeshError.from_info(last)
        if source.manifest is None:
            raise AssertionError("who is linked was described")
        return source.manifest

    def note(self, judged: Judged) -> None:
        """Note a pull that has ended. After some that failed in a row, the link is undone, and made again when the source's record comes next."""
        for connection in judged.moved:
            self._doubts.moved(connection)
        for connection in judged.failed:
            ref = connection.peer
            source = self._sources.get(ref.worker_id)
            if source is None or source.ref != ref or not source.is_linked or not self._doubts.failed(connection):
                continue
            self._log.error("source_doubted", source=ref.worker_id, source_incarnation=ref.incarnation)
            del self._sources[ref.worker_id]
            self._let_go(source, "is linked anew: what was pulled from it did not arrive")

    async def run(self, bucket: Bucket) -> None:
        """Link with each prefill worker that appears, before anybody asks for it."""
        async with await bucket.watch() as watch:
            async for change in watch:
                match change:
                    case Snapshot():
                        pass  # silence is judged by `run_ticks`
                    case Entry(deleted=True, key=worker_id):
                        self._lost(worker_id)
                    case Entry():
                        self._see(change)

    async def run_ticks(self, bucket: Bucket) -> None:
        """Let go of sources that have fallen silent. See `Silence` for when that can be told."""
        while True:
            await self._clock.sleep(_TICK_S)
            if self._silence.says_nothing():
                self._heard.reconnected(self._clock.monotonic())
            for worker_id in await take_gone(self._heard, bucket, self._clock):
                self._lost(worker_id)

    def _see(self, entry: Entry) -> None:
        record = self._refusals.record("workers", entry, WorkerRecord, lambda record: record.worker_id)
        if record is None or record.role is not WorkerRole.PREFILL:
            return
        self._heard.put(record.worker_id, record, self._clock.monotonic())
        try:
            source = self._source(WorkerRef(worker_id=record.worker_id, incarnation=record.incarnation))
        except PdmeshError as error:
            self._log.error("source_passed_over", source=record.worker_id, error_message=error.message)
            self._metrics.ended(error.info)
            return
        # Its record comes every two seconds: that is when a try that failed is repeated.
        if not source.is_linked and not source.is_linking and not source.is_refused:
            self._begin(source)

    def _source(self, ref: WorkerRef) -> _Source:
        known = self._sources.get(ref.worker_id)
        if known is not None and known.ref == ref:
            return known
        if known is None and len(self._sources) >= MAX_SOURCES:
            text = f"{MAX_SOURCES} prefill workers are linked as sources; {ref.worker_id} is one more"
            raise PdmeshError(text, code=ErrorCode.OVERLOADED)
        if known is not None:
            self._let_go(known)
        source = self._sources[ref.worker_id] = _Source(ref=ref)
        return source

    def _lost(self, worker_id: str) -> None:
        self._heard.delete(worker_id)
        source = self._sources.pop(worker_id, None)
        if source is not None:
            self._let_go(source)

    def _begin(self, source: _Source) -> None:
        source.is_linking = True
        source.done.clear()
        if not self._tasks.try_start(partial(self._link, source)):
            self._end(source, ErrorInfo(code=ErrorCode.OVERLOADED, message="too many links are being made"))

    async def _link(self, source: _Source) -> None:
        deadline = Deadline.after(self._clock, _LINK_S)
        try:
            ranks = await describe_worker(self._bus, WorkerRole.PREFILL, source.ref, deadline)
            source.manifest = ranks[0].manifest
            if self._is_present(source):
                await self._replicas.link_source(source.ref, ranks)
            if not self._is_present(source):
                await self._unlink(source.ref)
                return
        except EngineDeadError:
            raise  # the worker cannot go on
        except PdmeshError as error:
            self._end(source, error.info)
        else:
            self._end(source, None)

    def _end(self, source: _Source, refusal: ErrorInfo | None) -> None:
        self._metrics.ended(refusal)
        is_news = refusal is None or source.refusal != refusal
        source.is_linking, source.is_linked, source.refusal = False, refusal is None, refusal
        source.done.set()
        if refusal is not None and source.ref.worker_id not in self._heard.known and self._is_present(source):
            del self._sources[source.ref.worker_id]  # somebody named it, but it never registered
            self._begin_unlink(source.ref)  # or it did, and was still linked when it was named
        if is_news:
            self._log.info(
                "source_linked" if refusal is None else "source_not_linked",
                source=source.ref.worker_id,
                source_incarnation=source.ref.incarnation,
                error_code=None if refusal is None else refusal.code,
                error_message=None if refusal is None else refusal.message,
            )

    def _num_of(self, standing: Standing) -> int:
        return sum(source.standing is standing for source in self._sources.values())

    def _is_present(self, source: _Source) -> bool:
        return self._sources.get(source.ref.worker_id) is source

    def _is_known(self, ref: WorkerRef) -> bool:
        """Whether a start has come back since its end: its new link takes the place of what is left of the one before."""
        known = self._sources.get(ref.worker_id)
        return known is not None and known.ref == ref

    def _let_go(self, source: _Source, why: str = "is gone") -> None:
        """Unlink a start; whoever waits for it is told why."""
        text = f"{source.ref.worker_id} {source.ref.incarnation} {why}"
        source.is_linked, source.refusal = False, ErrorInfo(code=ErrorCode.WORKER_LOST, message=text)
        source.done.set()
        self._doubts.forget(source.ref)
        self._log.info("source_gone", source=source.ref.worker_id, source_incarnation=source.ref.incarnation)
        self._begin_unlink(source.ref)

    def _begin_unlink(self, ref: WorkerRef) -> None:
        if not self._tasks.try_start(partial(self._unlink, ref)):
            self._log.error("source_left_linked", source=ref.worker_id)

    async def _unlink(self, ref: WorkerRef) -> None:
        try:
            await self._replicas.unlink(ref, is_wanted=partial(self._is_known, ref))
        except EngineDeadError:
            raise
        except PdmeshError as error:
            self._log.error("source_unlink_failed", source=ref.worker_id, error_message=error.message)
