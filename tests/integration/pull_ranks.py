"""A prefill worker of two thread ranks and a decode worker of any cut, real engines behind real services; the test plays the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from common.bus.storage import EVENTS_CONFIG
from common.layout.replicas import plan_workers
from common.runtime.clock import SystemClock
from common.worker.replica import StartedEngine
from common.worker.settings import WorkerSettings
from contracts.dataplane import Asked, RefusalReason, Transport
from contracts.handoff import Grant, PartsReport, PrefillFinished, RequestEnded, Reserved, TakenOver
from contracts.manifest import PlannedPart, Role
from contracts.pull import PullEnded, Transfer
from contracts.requests import Accepted, SamplingParams
from contracts.workers import WorkerRole
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.cache_bytes import Memories
from tests.integration.engine_world import engine, starts, thread_launcher
from tests.integration.handoff_pairs import owed_by
from tests.integration.stored_reference import StoredPrompt, load_reference
from tests.integration.worker_world import Mesh

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_TOKENS = 16
SLOTS = 4
PROMPTS: tuple[StoredPrompt, ...] = tuple(load_reference("tiny").prompts[number] for number in (20, 21, 5))
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=0.0, ignore_eos=True)
TIMEOUT_S = 120

PartName = tuple[Role, int, int, int]


@dataclass(kw_only=True)
class RanksMesh:
    """Both workers, linked both ways where decode pulls."""

    mesh: Mesh
    parts: tuple[PlannedPart, ...]
    has_drafts: bool = False

    async def compute(self, handoff: str, prompt: StoredPrompt, **changes: Any) -> tuple[Reserved, PrefillFinished]:
        """Reserve and compute one prompt; `changes` are those of the order to compute it."""
        mesh = self.mesh
        mesh.prompts[handoff] = prompt.token_ids
        await mesh.send_prompt("prefill", "prefill-0", handoff)
        reserved = await mesh.reserve(SAMPLING, handoff)
        assert isinstance(reserved, Reserved), reserved
        order = {"sampling": SAMPLING, "pulled": reserved.pulled} | changes
        assert await mesh.run(reserved, **order) == Accepted(handoff_id=handoff)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        return reserved, finished

    async def pull(self, handoff: str, source: Grant | None, lock: int = 1) -> PullEnded:
        """Pull to its end."""
        assert source is not None
        assert await self.mesh.pull(source, lock, handoff) == Accepted(handoff_id=handoff)
        ended = await self.mesh.heard.get()
        assert isinstance(ended, PullEnded)
        return ended

    def moved(self, handoff: str, transfer: Transfer) -> frozenset[PartName]:
        """Parts that were told of as moved this way."""
        reports = [each for each in self.mesh.reports if (each.handoff_id, each.transfer) == (handoff, transfer)]
        return frozenset(name for report in reports for name in _names(report))

    async def all_moved(self, handoff: str) -> None:
        """Wait until each part that a prompt owes something of has been told of, by one way or the other."""
        num_tokens = len(self.mesh.prompts[handoff])
        owed = (part for part in self.parts if owed_by(part, 0, num_tokens).ranges)
        names = frozenset((part.role, part.layer, part.src_rank, part.dst_rank) for part in owed)
        while self.moved(handoff, Transfer.PUSH) | self.moved(handoff, Transfer.PULL) != names:
            await self.mesh.clock.sleep(0.01)

    async def tokens(self, handoff: str, finished: PrefillFinished) -> list[int]:
        """Commit, and read the answer to its end."""
        assert finished.first_token is not None
        told = await self.mesh.commit(finished.first_token, handoff, finished.digests, drafts=self.has_drafts)
        assert told == Accepted(handoff_id=handoff)
        ids, _ = await self.mesh.text()
        assert isinstance(await self.mesh.heard.get(), TakenOver)
        assert isinstance(await self.mesh.heard.get(), RequestEnded)
        return ids

    def counted(self, worker: str, name: str) -> dict[tuple[str, ...], float]:
        """The series of one of a worker's counters that are not zero, by the values of their labels."""
        families = text_string_to_metric_families(self.mesh.services[worker].metrics.exposition().decode())
        samples = (sample for family in families for sample in family.samples if sample.name == f"pdmesh_{name}")
        return {tuple(sample.labels.values()): sample.value for sample in samples if sample.value}

    async def turned_away(self, worker: str, *expected: tuple[Asked, RefusalReason], at_least: int) -> None:
        """Wait until a worker's ranks have told of so many refusals of each of these kinds; of any other there are none."""
        name = "worker_transfers_refused_total"
        while min(self.counted(worker, name).get(kind, 0) for kind in expected) < at_least:
            await self.mesh.clock.sleep(0.01)
        assert self.counted(worker, name).keys() == set(expected)

    async def release(self, handoff: str) -> None:
        """Release both workers."""
        for role in ("prefill", "decode"):
            await self.mesh.release(role, f"{role}-0", handoff)


def _names(report: PartsReport) -> frozenset[PartName]:
    return frozenset((part.role, part.layer, report.source_rank, part.destination_rank) for part in report.parts)


@asynccontextmanager
async def ranks_mesh(
    sockets: Path,
    *,
    transport: Transport = Transport.SHM,
    failpoints: str = "",
    cut: tuple[int, int] = (1, 1),
    prefill: dict[str, Any] | None = None,
    memories: Memories | None = None,
    **decode: Any,
) -> AsyncIterator[RanksMesh]:
    """Start both; `prefill` are settings of the prefill worker, `decode` of the other, and so are the failpoints and the `cut`, its tp and dcp.

    `memories` remembers the regions of both. Everything has come back at the end.
    """
    memories = memories or Memories()
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        started: dict[WorkerRole, StartedEngine] = {}
        settings: dict[WorkerRole, WorkerSettings] = {}
        for kind, (tp, dcp) in ((PrefillService, (2, 1)), (DecodeService, cut)):
            role = kind.role
            settings[role] = WorkerSettings(
                worker_id=f"{role}-0",
                model=SHIPPED,
                tp=tp,
                dcp=dcp,
                num_slots=SLOTS,
                num_blocks=128,
                max_step_tokens=256,
                transport=transport,
                **(decode if role is WorkerRole.DECODE else prefill or {}),
            )
            messages = starts(
                SHIPPED,
                sockets,
                tp,
                dcp=dcp,
                worker_id=f"{role}-0",
                incarnation=f"i-{role}-0",
                num_slots=SLOTS,
                num_staging_rows=settings[role].staging_rows_of(role),
                transport=transport,
                failpoints=failpoints if role is WorkerRole.DECODE else "",
                drafter=settings[role].drafter_of(role),
                num_speculative_tokens=settings[role].depth_of(role),
                mtp_draft_body_tp1=settings[role].mtp_draft_body_tp1,
            )
            ranks, info = await stack.enter_async_context(engine(messages, thread_launcher(tp, watch=memories.watch)))
            started[role] = StartedEngine(engine=ranks, info=info)
        plan = plan_workers(*([rank.manifest for rank in each.info.ranks] for each in started.values()))
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(group, SystemClock())
            tasks = asyncio.all_tasks()
            await mesh.bus.ensure_stream(EVENTS_CONFIG)
            await mesh.open()
            for kind in (PrefillService, DecodeService):
                await mesh.host(kind, settings[kind.role], (started[kind.role],))
            await mesh.linked()
            yield RanksMesh(mesh=mesh, parts=plan.parts, has_drafts=plan.has_drafts)
            mesh.assert_empty()
            for host in mesh.hosts:
                await host.drain()
                await host.close()
            for task in asyncio.all_tasks() - tasks:
                task.cancel()
