"""A worker that answers a broker as a test tells it to, and common ways of answering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from common.bus.port import Bus, Message, Subscription
from common.bus.storage import WORKERS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.runtime.clock import Clock
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    CommitHandoff,
    Grant,
    HandoffList,
    ListHandoffs,
    PartsAnswer,
    PullHandoff,
    QueryParts,
    Released,
    ReleaseHandoff,
    Reserved,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.manifest import RankManifest
from contracts.requests import (
    Accepted,
    Refused,
    WorkerRef,
)
from contracts.subjects import WorkerVerb
from contracts.workers import (
    DescribeWorker,
    WorkerDescription,
    WorkerRole,
)
from tests.integration.worker_records import worker_record

GRANT = Grant(worker_id="decode-0", incarnation="id", generation=7, block_ids=(1, 2, 3, 4), slot=2)


_KINDS: dict[str, type[msgspec.Struct]] = {
    WorkerVerb.RESERVE: ReserveDecode,
    WorkerVerb.COMMIT: CommitHandoff,
    WorkerVerb.RELEASE: ReleaseHandoff,
    WorkerVerb.DESCRIBE: DescribeWorker,
    WorkerVerb.PARTS: QueryParts,
    WorkerVerb.HANDOFFS: ListHandoffs,
    WorkerVerb.PULL: PullHandoff,
}


Script = Callable[[Any], msgspec.Struct | None]


class ScriptedWorker:
    """Answers as it is told. A script that returns None does not answer: the message or the answer was lost."""

    def __init__(self, bus: Bus, role: WorkerRole, ref: WorkerRef, manifests: tuple[RankManifest, ...]) -> None:
        self.bus = bus
        self.role = role
        self.ref = ref
        self.manifests = manifests
        self.heard: list[msgspec.Struct] = []
        self.scripts: dict[str, Script] = {
            WorkerVerb.RESERVE: lambda message: Reserved(
                handoff_id=message.handoff_id, grant=GRANT, num_cached_tokens=0, prepare_ms=1.5
            ),
            WorkerVerb.RELEASE: lambda message: Released(
                handoff_id=message.handoff_id, response_rpc_ms=0.75 if role is WorkerRole.PREFILL else None
            ),
            WorkerVerb.DESCRIBE: self._describe,
            WorkerVerb.HANDOFFS: lambda _message: HandoffList(incarnation=ref.incarnation, handoff_ids=()),
            WorkerVerb.PARTS: lambda message: PartsAnswer(handoff_id=message.handoff_id, reports=()),
        }

    def _describe(self, message: DescribeWorker) -> WorkerDescription:
        return WorkerDescription(
            worker_id=self.ref.worker_id,
            incarnation=self.ref.incarnation,
            num_ranks=len(self.manifests),
            manifest=self.manifests[message.rank],
            region=None,
        )

    def of(self, kind: type[msgspec.Struct]) -> list[Any]:
        """The messages of one kind that came, in order."""
        return [message for message in self.heard if isinstance(message, kind)]

    async def listen(self) -> Subscription:
        """Subscribe; give the result to `answer`."""
        return await self.bus.subscribe(subjects.worker_rpc_filter(self.role, self.ref.worker_id))

    async def answer(self, subscription: Subscription) -> None:
        """Answer what comes, one after the other."""
        async for message in subscription:
            await self._answer(message)

    async def _answer(self, message: Message) -> None:
        verb = subjects.verb_of(message.subject)
        run = RunMixed if self.role is WorkerRole.MIXED else RunPrefill
        command: Any = decode(message.data, _KINDS.get(verb, run))
        self.heard.append(command)
        script = self.scripts.get(verb, lambda asked: Accepted(handoff_id=asked.handoff_id))
        reply = script(command)
        if reply is not None:
            await message.respond(encode(reply))

    async def announce(self) -> None:
        """Put the worker's record."""
        record = worker_record(self.ref, self.role, tp=len(self.manifests))
        bucket = await self.bus.ensure_bucket(WORKERS_CONFIG)
        await bucket.put(self.ref.worker_id, encode(record))


def refusing(code: ErrorCode) -> Script:
    """A script that refuses."""
    error = ErrorInfo(code=code, message="no")
    return lambda message: Refused(handoff_id=message.handoff_id, error=error)


def losing(times: int, otherwise: Script) -> Script:
    """A script that does not answer the first `times` messages."""
    left = [times]

    def script(message: Any) -> msgspec.Struct | None:
        if left[0]:
            left[0] -= 1
            return None
        return otherwise(message)

    return script


async def manifests(clock: Clock, ref: WorkerRef, tp: int, **changes: Any) -> tuple[RankManifest, ...]:
    """What a worker with made-up caches says of its ranks."""
    engine = FakeEngine(clock, worker_id=ref.worker_id, incarnation=ref.incarnation, tp=tp, **changes)
    return tuple(rank.manifest for rank in (await engine.start()).ranks)
