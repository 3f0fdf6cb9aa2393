"""What the broker hears on the bus: requests, reports of parts, and the workers' records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from common.bus.port import Bus, Entry, Snapshot, Subscription, Watch
from common.bus.refusals import Refusals
from common.bus.rpc import Handler, RpcEdge
from common.bus.storage import LINKS_CONFIG, ROUTERS_CONFIG, WORKERS_CONFIG
from common.runtime.lifecycle import Log
from contracts import subjects
from contracts.codec import decode
from contracts.errors import InvalidValueError, PdmeshError
from contracts.handoff import PartsReport, PrefillFinished, RequestEnded, TakenOver
from contracts.links import LinkRecord
from contracts.pull import PullEnded
from contracts.requests import Accepted, CancelRequest, Ping, Pong, ReplayTokens, SubmitRequest, WorkerRef
from contracts.routers import RouterRecord
from contracts.show import ShowHandoff
from contracts.subjects import BrokerVerb
from contracts.workers import WorkerRecord
from services.broker.service import Broker

MAX_WAITING_REPORTS: Final = 65536
CLOSE_TIMEOUT_S: Final = 2.0


class BrokerEdges:
    """Connects a broker to a bus. It is known to its callers only after all that it must hear has been subscribed to."""

    def __init__(
        self, broker: Broker, bus: Bus, group: asyncio.TaskGroup, log: Log, refusals: Refusals, *, partition: int
    ) -> None:
        self._broker = broker
        self._bus = bus
        self._group = group
        self._log = log
        self._refusals = refusals
        self._partition = partition
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Listen: first to what is told, then to what is asked. Raises `BusError`."""
        workers = await (await self._bus.ensure_bucket(WORKERS_CONFIG)).watch()
        links = await (await self._bus.ensure_bucket(LINKS_CONFIG)).watch()
        routers = await (await self._bus.ensure_bucket(ROUTERS_CONFIG)).watch()
        parts = await self._bus.subscribe(subjects.PARTS_FILTER, max_pending=MAX_WAITING_REPORTS)
        rpc = RpcEdge(self._bus, self._group, self._log, self._broker.metrics)
        read = await rpc.serve(subjects.broker_rpc_filter(self._partition), self.handlers())
        for name, work in (
            ("workers", self._watch(workers)),
            ("links", self._watch_links(links)),
            ("routers", self._watch_routers(routers)),
            ("parts", self._read_parts(parts)),
            ("rpc", read()),
            ("sweeps", self._broker.run_sweeps()),
            ("strays", self._broker.strays.run()),
        ):
            self._tasks.append(self._group.create_task(work, name=name))

    async def close(self) -> None:
        """Stop listening. Twice is fine."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def handlers(self) -> Mapping[str, Handler]:
        """What the broker can be asked, by verb."""
        return {
            BrokerVerb.SUBMIT: self._submit,
            BrokerVerb.CANCEL: self._cancel,
            BrokerVerb.PREFILL_FINISHED: self._prefill_finished,
            BrokerVerb.PULL_ENDED: self._pull_ended,
            BrokerVerb.TAKEN_OVER: self._taken_over,
            BrokerVerb.ENDED: self._ended,
            BrokerVerb.OUTCOME: self._outcome,
            BrokerVerb.SHOW: self._show,
            BrokerVerb.PING: self._ping,
        }

    async def _submit(self, data: bytes) -> msgspec.Struct:
        return await self._broker.submit(decode(data, SubmitRequest))

    async def _ping(self, data: bytes) -> msgspec.Struct:
        decode(data, Ping)
        return Pong(broker_id=self._broker.broker_id, max_timeout_ms=self._broker.max_timeout_ms)

    async def _cancel(self, data: bytes) -> msgspec.Struct:
        return await self._broker.cancel(decode(data, CancelRequest))

    async def _outcome(self, data: bytes) -> msgspec.Struct:
        asked = decode(data, ReplayTokens)
        end = None if asked.ended else await self._broker.end_of(asked.handoff_id)
        return Accepted(handoff_id=asked.handoff_id) if end is None else end

    async def _prefill_finished(self, data: bytes) -> msgspec.Struct:
        return await self._broker.take(decode(data, PrefillFinished))

    async def _pull_ended(self, data: bytes) -> msgspec.Struct:
        return await self._broker.take(decode(data, PullEnded))

    async def _show(self, data: bytes) -> msgspec.Struct:
        return await self._broker.show(decode(data, ShowHandoff).handoff_id)

    async def _taken_over(self, data: bytes) -> msgspec.Struct:
        return await self._broker.take(decode(data, TakenOver))

    async def _ended(self, data: bytes) -> msgspec.Struct:
        return await self._broker.take(decode(data, RequestEnded))

    async def _read_parts(self, subscription: Subscription) -> None:
        async with subscription:
            async for message in subscription:
                report = self._refusals.message("parts done", message.data, PartsReport, subject=message.subject)
                if report is None:
                    continue
                try:
                    _check_subject(report, message.subject)
                    self._broker.parts_reported(report)
                except PdmeshError as error:
                    self._refusals.note("parts done", error, subject=message.subject)

    async def _watch(self, watch: Watch) -> None:
        async with watch:
            async for entry in watch:
                match entry:
                    case Snapshot():
                        pass  # who is not in it falls silent, and silence is judged by the sweeps
                    case Entry(deleted=True):
                        self._broker.workers.left(entry.key)
                    case Entry():
                        self._heard(entry)

    def _heard(self, entry: Entry) -> None:
        record = self._refusals.record("workers", entry, WorkerRecord, lambda record: record.worker_id)
        if record is not None:
            worker = WorkerRef(worker_id=record.worker_id, incarnation=record.incarnation)
            self._broker.workers.heard(worker)
            self._broker.orphans.met(record.role, worker)

    async def _watch_links(self, watch: Watch) -> None:
        async with watch:
            async for entry in watch:
                match entry:
                    case Snapshot():
                        pass  # what is said of a worker is forgotten with the worker
                    case Entry(deleted=True):
                        self._broker.links.left(entry.key)
                    case Entry():
                        self._link_heard(entry)

    def _link_heard(self, entry: Entry) -> None:
        record = self._refusals.record("links", entry, LinkRecord, _link_key_of)
        if record is not None:
            self._broker.links.heard(entry.key, record)

    async def _watch_routers(self, watch: Watch) -> None:
        async with watch:
            async for entry in watch:
                match entry:
                    case Snapshot():
                        pass  # who is not in it falls silent, and silence is judged by the sweeps
                    case Entry(deleted=True):
                        self._broker.routers.left(entry.key)
                    case Entry():
                        record = self._refusals.record("routers", entry, RouterRecord, lambda each: each.router_id)
                        if record is not None:
                            self._broker.routers.heard(record)


def _check_subject(report: PartsReport, subject: str) -> None:
    """Raise `InvalidValueError` for a report of another handoff than the one that its subject names."""
    if subject != subjects.parts(report.handoff_id):
        raise InvalidValueError(field="handoff_id", value=report.handoff_id, rule=f"as in the subject {subject}")


def _link_key_of(record: LinkRecord) -> str:
    return subjects.link_key(record.prefill.worker_id, record.decode.worker_id)
