"""Links with decode workers: the plan between two layouts, compiled once, when a pair of workers first meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from common.bus.errors import BusError
from common.bus.port import Bucket, Bus, Entry, Snapshot
from common.engine.port import EngineDeadError, EngineError
from common.layout.planner import ReshardPlan
from common.layout.refusal import PlanRefusedError
from common.layout.replicas import plan_workers
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.worker.replica_set import ReplicaSet
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import PdmeshError
from contracts.requests import WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import (
    DescribeRefused,
    DescribeWorker,
    Link,
    LinkState,
    WorkerDescription,
    WorkerRecord,
    WorkerRole,
)

_DESCRIBE_TIMEOUT_S: Final = 5.0
_CHECK_EVERY_S: Final = 2.0


class _Linked(msgspec.Struct, frozen=True, kw_only=True):
    link: Link
    plan: ReshardPlan | None


class Links:
    """Every decode worker that has been met, by id: linked or refused, at one incarnation.

    A restarted worker is a new one. Who leaves `PD_WORKERS` is unlinked.
    """

    def __init__(self, bus: Bus, clock: Clock, log: Log, replicas: ReplicaSet) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._replicas = replicas
        self._known: dict[str, _Linked] = {}
        self._announce: Callable[[], None] = lambda: None

    @property
    def verdicts(self) -> tuple[Link, ...]:
        """What became of each meeting."""
        return tuple(known.link for known in self._known.values())

    def plan_for(self, worker_id: str, incarnation: str) -> ReshardPlan | None:
        """The plan to one start of a decode worker, or None without a link."""
        known = self._known.get(worker_id)
        return known.plan if known is not None and known.link.incarnation == incarnation else None

    async def run(self, bucket: Bucket, announce: Callable[[], None]) -> None:
        """Watch who comes and goes, and link. `announce` is called whenever the links have changed."""
        self._announce = announce
        async with await bucket.watch() as watch:
            async for change in watch:
                match change:
                    case Snapshot(keys=keys):
                        for worker_id in tuple(self._known):
                            if worker_id not in keys:
                                await self._unlink(worker_id)
                    case Entry(deleted=True, key=worker_id):
                        await self._unlink(worker_id)
                    case Entry(value=value):
                        await self._meet(value)

    async def run_checks(self, bucket: Bucket) -> None:
        """Unlink whose record has expired: a watch does not tell."""
        while True:
            await self._clock.sleep(_CHECK_EVERY_S)
            for worker_id in tuple(self._known):
                try:
                    gone = await bucket.get(worker_id) is None
                except BusError:
                    break
                if gone:
                    await self._unlink(worker_id)

    async def _meet(self, value: bytes) -> None:
        try:
            record = decode(value, WorkerRecord)
        except PdmeshError as error:
            self._log.info("message_refused", subject=subjects.WORKERS_BUCKET, error=error.message)
            return
        known = self._known.get(record.worker_id)
        if record.role is not WorkerRole.DECODE or (known and known.link.incarnation == record.incarnation):
            return
        if known is not None:
            await self._unlink(record.worker_id)
        peer = WorkerRef(worker_id=record.worker_id, incarnation=record.incarnation)
        try:
            compiled = await self._link(peer, record)
        except (PlanRefusedError, EngineError) as error:
            link = Link(
                worker_id=peer.worker_id, incarnation=peer.incarnation, state=LinkState.REFUSED, reason=error.message
            )
            self._known[peer.worker_id] = _Linked(link=link, plan=None)
            self._log.error(
                "link_refused", peer=peer.worker_id, peer_incarnation=peer.incarnation, reason=error.message
            )
        except EngineDeadError:
            raise
        except PdmeshError as error:  # its next record comes within seconds: then again
            self._log.info("link_delayed", peer=peer.worker_id, error_code=error.code, error_message=error.message)
            return
        else:
            link = Link(worker_id=peer.worker_id, incarnation=peer.incarnation, state=LinkState.LINKED)
            self._known[peer.worker_id] = _Linked(link=link, plan=compiled)
            self._log.info(
                "peer_linked", peer=peer.worker_id, peer_incarnation=peer.incarnation, num_parts=len(compiled.parts)
            )
        self._announce()

    async def _link(self, peer: WorkerRef, record: WorkerRecord) -> ReshardPlan:
        ranks = [await self._describe(peer, rank) for rank in range(record.dp * record.tp)]
        compiled = plan_workers(self._replicas.manifests, [each.manifest for each in ranks])
        await self._replicas.link(peer, ranks)
        return compiled

    async def _describe(self, peer: WorkerRef, rank: int) -> WorkerDescription:
        subject = subjects.worker_rpc(WorkerRole.DECODE, peer.worker_id, WorkerVerb.DESCRIBE)
        reply = await self._bus.request(subject, encode(DescribeWorker(rank=rank)), timeout=_DESCRIBE_TIMEOUT_S)
        answer: WorkerDescription | DescribeRefused = decode(reply.data, WorkerDescription | DescribeRefused)  # type: ignore[arg-type]  # a union is not a type
        match answer:
            case WorkerDescription():
                if answer.incarnation != peer.incarnation:
                    raise PdmeshError(f"{peer.worker_id} has restarted meanwhile")
                return answer
            case DescribeRefused():
                raise PdmeshError.from_info(answer.error)

    async def _unlink(self, worker_id: str) -> None:
        known = self._known.pop(worker_id, None)
        if known is None:
            return
        if known.plan is not None:
            await self._replicas.unlink(WorkerRef(worker_id=worker_id, incarnation=known.link.incarnation))
        self._log.info("peer_unlinked", peer=worker_id, peer_incarnation=known.link.incarnation)
        self._announce()
