"""Workers with fake engines on the in-memory bus, in virtual time; the test plays broker and router."""

import asyncio
import base64
import hashlib
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from common.bus.memory import MemoryBus, MemoryServer
from common.bus.port import Message, Subscription
from common.bus.storage import LINKS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.engine.fake.tokens import fake_token
from common.engine.port import EngineError, StepResult
from common.runtime.clock import Clock
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.replica import StartedEngine
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import EngineKind, WorkerSettings
from contracts import subjects
from contracts.codec import decode, encode
from contracts.handoff import (
    CommitHandoff,
    Grant,
    PartDigest,
    PartsReport,
    PrefillFinished,
    PullHandoff,
    Released,
    ReleaseHandoff,
    RequestEnded,
    Reserved,
    ReserveDecode,
    RunMixed,
    RunPrefill,
    TakenOver,
)
from contracts.links import LinkRecord, LinkState
from contracts.pull import PullEnded
from contracts.rank import PeerSide, StepPlan
from contracts.requests import (
    Accepted,
    PromptFrame,
    Refused,
    ReplayTokens,
    SamplingParams,
    TokenFrame,
    WorkerRef,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.lease_holder import LeaseHolder

HANDOFF, REQUEST = "r1-0", "r1"
PROMPT = list(range(1, 41))
HASH = hashlib.sha256(array("I", PROMPT).tobytes()).hexdigest()
SAMPLING = SamplingParams(max_tokens=12, seed=9, temperature=0.0)
EXPECTED = [fake_token(9, position) for position in range(len(PROMPT), len(PROMPT) + 12)]


def request_of(handoff: str) -> str:
    """The request of a first attempt."""
    return handoff.removesuffix("-0")


def mixed_run(**changes: Any) -> RunMixed:
    """What asks the mixed worker `mixed-0` to serve the usual prompt."""
    values: dict[str, Any] = {
        "handoff_id": HANDOFF,
        "request_id": REQUEST,
        "attempt": 0,
        "router_id": "router-0",
        "incarnation": "i-mixed-0",
        "fence": 1,
        "num_prompt_tokens": len(PROMPT),
        "prompt_hash": HASH,
        "sampling": SAMPLING,
        "timeout_ms": 60_000,
    }
    return RunMixed(**(values | changes))


class FaultyEngine(FakeEngine):
    """A fake engine whose next steps, digests or releases can be told to go wrong."""

    failing_steps = 0
    failing_digests = 0
    failing_releases = 0
    writers_left = 0

    async def step(self, plan: StepPlan) -> StepResult:
        """Fail, alike on all ranks, as often as told."""
        if self.failing_steps:
            self.failing_steps -= 1
            raise EngineError("rank 1: out of memory")
        return await super().step(plan)

    async def digest(self, seq: int, side: PeerSide, start: int, end: int) -> tuple[PartDigest, ...]:
        """Fail as often as told."""
        if self.failing_digests:
            self.failing_digests -= 1
            raise EngineError("rank 1: out of memory")
        return await super().digest(seq, side, start, end)

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Fail, or say that a writer is still at work, as often as told."""
        if self.failing_releases:
            self.failing_releases -= 1
            raise EngineError("rank 1: no such mapping")
        if self.writers_left:
            self.writers_left -= 1
            return frozenset(seqs)
        return await super().release(seqs, generation, timeout_ms)


class Mute(DecodeService):
    """An observer of an engine loop that is never run."""

    def __init__(self) -> None:
        """Without any of a service's parts."""


class Mesh:
    """Workers, and what a broker and a router would hear of them."""

    def __init__(self, group: asyncio.TaskGroup, clock: Clock) -> None:
        self.group = group
        self.clock = clock
        self.server = MemoryServer(clock)
        self.bus: MemoryBus = self.server.connect()
        self.lease = LeaseHolder(self.bus, clock)
        self.services: dict[str, WorkerService] = {}
        self.hosts: list[WorkerHost] = []
        self.heard: asyncio.Queue[PrefillFinished | PullEnded | TakenOver | RequestEnded] = asyncio.Queue()
        self.reports: list[PartsReport] = []
        self.frames: asyncio.Queue[TokenFrame] = asyncio.Queue()
        self.log_levels: list[str] = []
        self.prompts: dict[str, tuple[int, ...]] = {}
        """The prompts of handoffs; `PROMPT` is that of every other."""
        self.outcomes: dict[str, msgspec.Struct | None] = {}
        """What the broker answers of handoffs, None for nothing; every other is under way."""
        self.questions: list[Message] = []
        """The questions for that, in the order in which the broker got them."""

    def prompt(self, handoff: str) -> tuple[tuple[int, ...], bytes]:
        """Token ids of a handoff's prompt, and as they are sent."""
        ids = self.prompts.get(handoff, tuple(PROMPT))
        return ids, array("I", ids).tobytes()

    def hash_of(self, handoff: str) -> str:
        """The hash of a handoff's prompt."""
        return hashlib.sha256(self.prompt(handoff)[1]).hexdigest()

    async def open(self) -> None:
        """Listen as the broker, which leads, and as the router."""
        await self.lease.put()
        self.group.create_task(self.lease.run())
        broker = await self.bus.subscribe(subjects.broker_rpc_filter())
        parts = await self.bus.subscribe(subjects.PARTS_FILTER)
        tokens = await self.bus.subscribe(subjects.tokens_filter("router-0"))
        self.group.create_task(self._answer(broker))
        self.group.create_task(self._read(parts, lambda data: self.reports.append(decode(data, PartsReport))))
        self.group.create_task(self._read(tokens, lambda data: self.frames.put_nowait(decode(data, TokenFrame))))

    async def _answer(self, subscription: Subscription) -> None:
        kinds: dict[str, Any] = {
            BrokerVerb.PREFILL_FINISHED: PrefillFinished,
            BrokerVerb.PULL_ENDED: PullEnded,
            BrokerVerb.TAKEN_OVER: TakenOver,
            BrokerVerb.ENDED: RequestEnded,
        }
        async for message in subscription:
            if subjects.verb_of(message.subject) == BrokerVerb.OUTCOME:
                self.questions.append(message)
                handoff = decode(message.data, ReplayTokens).handoff_id
                outcome = self.outcomes.get(handoff, Accepted(handoff_id=handoff))
                if outcome is not None:
                    await message.respond(encode(outcome))
                continue
            report = decode(message.data, kinds[subjects.verb_of(message.subject)])
            self.heard.put_nowait(report)
            await message.respond(encode(Accepted(handoff_id=report.handoff_id)))

    async def follow(self, subject_filter: str, take: Callable[[bytes], None]) -> None:
        """Give everything that is said there to `take`, from now on."""
        self.group.create_task(self._read(await self.bus.subscribe(subject_filter), take))

    async def _read(self, subscription: Subscription, take: Callable[[bytes], None]) -> None:
        async for message in subscription:
            take(message.data)

    async def add(self, kind: type[WorkerService], worker_id: str, tp: int = 1, **changes: Any) -> WorkerService:
        """Start a worker of fake engines."""
        settings = WorkerSettings(worker_id=worker_id, model=Path("fake"), engine=EngineKind.FAKE, tp=tp, **changes)
        engines = [
            FaultyEngine(
                self.clock,
                worker_id=worker_id,
                incarnation=f"i-{worker_id}",
                dp_rank=dp_rank,
                dp=settings.dp,
                tp=tp,
                dcp=settings.dcp,
                num_blocks=settings.num_blocks,
                num_slots=settings.num_slots,
                num_staging_rows=settings.staging_rows_of(kind.role),
                drafter=settings.drafter_of(kind.role),
                num_speculative_tokens=settings.depth_of(kind.role),
                step_s=0.002,
            )
            for dp_rank in range(settings.dp)
        ]
        return await self.host(kind, settings, await start_engines(engines))

    async def host(
        self, kind: type[WorkerService], settings: WorkerSettings, engines: tuple[StartedEngine, ...]
    ) -> WorkerService:
        """Start a worker of these engines."""
        service = kind(
            WorkerParts(
                settings=settings,
                incarnation=f"i-{settings.worker_id}",
                engines=engines,
                bus=self.server.connect(),
                clock=self.clock,
                log=structlog.get_logger(),
                metrics=Metrics(),
                group=self.group,
                offload=inline,
                set_log_level=self.log_levels.append,
            )
        )
        host = WorkerHost(service, service.bus, self.group, service.log)
        await host.open()
        self.services[settings.worker_id] = service
        self.hosts.append(host)
        return service

    async def ask(
        self, role: str, worker_id: str, verb: WorkerVerb, message: msgspec.Struct, kind: Any = Accepted | Refused
    ) -> Any:
        """Ask a worker and decode its answer."""
        reply = await self.bus.request(subjects.worker_rpc(role, worker_id, verb), encode(message))
        return decode(reply.data, kind)

    async def link(self) -> LinkRecord | None:
        """What the bus says of the two workers."""
        bucket = await self.bus.ensure_bucket(LINKS_CONFIG)
        entry = await bucket.get(subjects.link_key("prefill-0", "decode-0"))
        return None if entry is None else decode(entry.value, LinkRecord)

    async def linked(self) -> None:
        """Wait until the bus says that the two workers are linked."""
        while (link := await self.link()) is None or link.state is not LinkState.LINKED:
            await self.clock.sleep(0.1)

    async def send_prompt(self, role: str, worker_id: str, handoff: str = HANDOFF, *, timeout_ms: int = 60_000) -> None:
        """Send the prompt as the router does."""
        ids, data = self.prompt(handoff)
        frame = PromptFrame(
            handoff_id=handoff,
            index=0,
            num_frames=1,
            num_prompt_tokens=len(ids),
            prompt_hash=hashlib.sha256(data).hexdigest(),
            timeout_ms=timeout_ms,
            ids_b64=base64.b64encode(data).decode(),
        )
        assert await self.ask(role, worker_id, WorkerVerb.PROMPT, frame) == Accepted(handoff_id=handoff)

    async def reserve(self, sampling: SamplingParams = SAMPLING, handoff: str = HANDOFF, **changes: Any) -> Any:
        """Reserve as the broker does."""
        reserve = ReserveDecode(
            handoff_id=handoff,
            request_id=request_of(handoff),
            attempt=0,
            router_id="router-0",
            incarnation="i-decode-0",
            source=WorkerRef(worker_id="prefill-0", incarnation="i-prefill-0"),
            fence=1,
            num_prompt_tokens=len(self.prompt(handoff)[0]),
            sampling=sampling,
            timeout_ms=60_000,
        )
        message = msgspec.structs.replace(reserve, **changes)
        return await self.ask("decode", "decode-0", WorkerVerb.RESERVE, message, Reserved | Refused)

    async def run(self, reserved: Reserved, **changes: Any) -> Any:
        """Ask for the prefill as the broker does."""
        ids, data = self.prompt(reserved.handoff_id)
        values: dict[str, Any] = {
            "handoff_id": reserved.handoff_id,
            "request_id": request_of(reserved.handoff_id),
            "attempt": 0,
            "router_id": "router-0",
            "incarnation": "i-prefill-0",
            "fence": 1,
            "num_prompt_tokens": len(ids),
            "prompt_hash": hashlib.sha256(data).hexdigest(),
            "sampling": SAMPLING,
            "timeout_ms": 60_000,
            "grant": reserved.grant,
            "num_cached_tokens": 0,
        }
        return await self.ask("prefill", "prefill-0", WorkerVerb.RUN, RunPrefill(**(values | changes)))

    async def pull(self, source: Grant, lock: int = 1, handoff: str = HANDOFF, **changes: Any) -> Any:
        """Ask for the pull as the broker does."""
        message = PullHandoff(
            handoff_id=handoff, incarnation="i-decode-0", fence=1, lock=lock, source=source, timeout_ms=30_000
        )
        return await self.ask("decode", "decode-0", WorkerVerb.PULL, msgspec.structs.replace(message, **changes))

    async def commit(
        self, first_token: int, handoff: str = HANDOFF, digests: tuple[PartDigest, ...] = (), *, drafts: bool = False
    ) -> Any:
        """Commit as the broker does; with `drafts` the draft's cache has come too."""
        message = CommitHandoff(
            handoff_id=handoff,
            incarnation="i-decode-0",
            fence=1,
            first_token=first_token,
            num_cached_tokens=0,
            timeout_ms=60_000,
            digests=digests,
            drafts=drafts,
        )
        return await self.ask("decode", "decode-0", WorkerVerb.COMMIT, message)

    async def release(self, role: str, worker_id: str, handoff: str = HANDOFF) -> Any:
        """Release as the broker does."""
        message = ReleaseHandoff(handoff_id=handoff, reason="test", tombstone_ms=60_000)
        return await self.ask(role, worker_id, WorkerVerb.RELEASE, message, Released | Refused)

    async def text(self, first: int = 0) -> tuple[list[int], TokenFrame]:
        """All token ids from index `first` up to the final frame, and that frame."""
        ids: list[int] = []
        while True:
            frame = await self.frames.get()
            assert frame.index == first + len(ids)
            ids += frame.token_ids
            if frame.final:
                return ids, frame

    def assert_empty(self) -> None:
        """Every pool is at its baseline, and nothing is remembered but tombstones."""
        for service in self.services.values():
            service.replicas.check_integrity()
            settings, pools = service.settings, [replica.pool for replica in service.replicas]
            free = (sum(pool.num_free_blocks for pool in pools), sum(pool.num_free_slots for pool in pools))
            assert free == (
                settings.dp * settings.num_blocks,
                settings.dp * settings.num_slots,
            )
            assert (len(service.table), len(service.prompts), len(service.tokens)) == (0, 0, 0)


def in_mesh(scenario: Callable[[Mesh], Awaitable[None]]) -> None:
    """Run a scenario in virtual time, then stop the mesh."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            mesh = Mesh(group, clock)
            await mesh.open()
            await scenario(mesh)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(main)


async def pair(mesh: Mesh, prefill: dict[str, Any] | None = None, **decode_changes: Any) -> None:
    """A prefill worker of two ranks a replica, and a decode worker, linked."""
    await mesh.add(PrefillService, "prefill-0", tp=2, **(prefill or {}))
    await mesh.add(DecodeService, "decode-0", **decode_changes)
    await mesh.linked()
