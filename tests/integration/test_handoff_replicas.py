"""Real engines behind real workers of several replicas: which bytes arrive in which replica, and what is decoded from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from common.engine.port import StepResult
from common.engine.transfer.peer_table import PeerTable
from common.engine.transfer.peers import Peer
from common.layout.replicas import plan_workers
from common.runtime.clock import SystemClock
from common.worker.replica import StartedEngine
from common.worker.settings import WorkerSettings
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import PrefillFinished, Reserved
from contracts.manifest import Dtype, RankManifest
from contracts.rank import StepItem, StepPlan
from contracts.requests import Accepted, SamplingParams, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core.ledger import Ledger
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.cache_bytes import Gathered, Held, Memories, differing, gather, poison, untouched
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.stored_reference import load_reference
from tests.integration.worker_world import Mesh

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_TOKENS = 24
CHUNK = 40  # two and a half blocks
SLOTS = 4
HANDOFFS = {"ra-0": 20, "rb-0": 21}
"""Two prompts of the stored reference, of 200 and 255 tokens: a block is left partial by each."""
NOISE = 5e-6
"""How far caches computed on two ranks may be from those of one, of a tensor's largest value: sums are taken in another order."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Replicas, and ranks in each."""

    dp: int
    tp: int


@dataclass(kw_only=True)
class World:
    """The engines of one pair of workers, and the memory of all of their ranks."""

    sizes: dict[WorkerRole, Size]
    engines: dict[WorkerRole, tuple[StartedEngine, ...]]
    memories: Memories

    def manifests(self, role: WorkerRole, dp_rank: int) -> list[RankManifest]:
        """The layouts of one replica."""
        return [rank.manifest for rank in self.engines[role][dp_rank].info.ranks]

    def memory(self, role: WorkerRole, dp_rank: int) -> list[memoryview]:
        """The caches of one replica."""
        return self.memories.of(f"{role}-0", lambda start: start.dp_rank == dp_rank)

    def gather(self, role: WorkerRole, dp_rank: int, held: Held) -> Gathered:
        """What a replica holds of a sequence, unsharded."""
        return gather(self.manifests(role, dp_rank), self.memory(role, dp_rank), held)


@dataclass(kw_only=True)
class Outcome:
    """Two handoffs at once: their tokens, where each lived, and the bytes of both sides before the first decode step."""

    tokens: dict[str, list[int]]
    dp_ranks: dict[str, tuple[int, int]]
    sent: dict[str, Gathered]
    arrived: dict[str, Gathered]
    clean: bool
    """Whether nothing but what was granted has been written in any replica of the decode worker."""
    errors: dict[str, ErrorInfo]
    """The requests that failed, which were neither committed nor decoded."""


PROMPTS = {handoff: load_reference("tiny").prompts[number] for handoff, number in HANDOFFS.items()}


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of all workers meet."""
    return tmp_path_factory.mktemp("s")


async def start_worker(stack: AsyncExitStack, role: WorkerRole, size: Size, sockets: Path, memories: Memories) -> Any:
    """The engines of a worker of threads."""
    started = []
    for dp_rank in range(size.dp):
        messages = starts(
            SHIPPED,
            sockets,
            size.tp,
            worker_id=f"{role}-0",
            incarnation=f"i-{role}-0",
            dp_rank=dp_rank,
            dp=size.dp,
            num_slots=SLOTS,
        )
        launcher = thread_launcher(size.tp, watch=memories.watch)
        group, info = await stack.enter_async_context(engine(messages, launcher))
        started.append(StartedEngine(engine=group, info=info))
    return tuple(started)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unsharded(sockets: Path) -> AsyncIterator[dict[str, Gathered]]:
    """The caches of both prompts on a worker of one rank that computes them in the same chunks, each alone."""
    memories = Memories()
    found: dict[str, Gathered] = {}
    async with AsyncExitStack() as stack:
        (one,) = await start_worker(stack, WorkerRole.MIXED, Size(dp=1, tp=1), sockets, memories)
        for seq, (handoff, prompt) in enumerate(PROMPTS.items()):
            ids = prompt.token_ids
            bound = binding(seq, len(ids))
            await one.engine.bind(bound)
            for start in range(0, len(ids), CHUNK):
                piece = ids[start : start + CHUNK]
                last = start + len(piece) == len(ids)
                item = StepItem(
                    seq=seq, start=start, num_tokens=len(piece), token_ids=piece, sample=last, last_chunk=last
                )
                await one.engine.step(StepPlan(step=start, items=(item,)))
            held = Held(block_ids=bound.block_ids, slot=bound.slot, num_tokens=len(ids))
            found[handoff] = gather([one.info.ranks[0].manifest], memories.of("mixed-0"), held)
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def world(request: pytest.FixtureRequest, sockets: Path) -> AsyncIterator[World]:
    """The engines of a prefill and a decode worker of the sizes that the test names: each test has its own, as each start has."""
    sizes = dict(zip((WorkerRole.PREFILL, WorkerRole.DECODE), request.param, strict=True))
    memories = Memories()
    async with AsyncExitStack() as stack:
        engines = {role: await start_worker(stack, role, size, sockets, memories) for role, size in sizes.items()}
        yield World(sizes=sizes, engines=engines, memories=memories)


async def hand_over(world: World) -> Outcome:
    """Both prompts at once, through the worker services. This test is the router and the broker, with the broker's own ledger."""
    for dp_rank in range(world.sizes[WorkerRole.DECODE].dp):
        poison(world.memory(WorkerRole.DECODE, dp_rank))
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        mesh = Mesh(group, SystemClock())
        mesh.prompts = {handoff: prompt.token_ids for handoff, prompt in PROMPTS.items()}
        tasks = asyncio.all_tasks()
        await mesh.open()
        for kind in (PrefillService, DecodeService):
            settings = WorkerSettings(
                worker_id=f"{kind.role}-0",
                model=SHIPPED,
                dp=world.sizes[kind.role].dp,
                tp=world.sizes[kind.role].tp,
                num_slots=SLOTS,
                max_step_tokens=CHUNK,
                prefill_chunk_tokens=CHUNK,
            )
            await mesh.host(kind, settings, world.engines[kind.role])
        await mesh.linked()
        outcome = await _hand_over(world, mesh)
        for host in mesh.hosts:
            await host.drain()
            await host.close()
        for task in asyncio.all_tasks() - tasks:
            task.cancel()
    return outcome


@contextmanager
def steps_held(engines: Sequence[StartedEngine]) -> Iterator[None]:
    """No step begins meanwhile: whoever comes second finds the first one still there, however slow the machine is."""
    gate = asyncio.Event()

    async def held(step: Callable[[StepPlan], Awaitable[StepResult]], plan: StepPlan) -> StepResult:
        await gate.wait()
        return await step(plan)

    with pytest.MonkeyPatch.context() as patch:
        for started in engines:
            patch.setattr(started.engine, "step", partial(held, started.engine.step))
        yield
        gate.set()


async def _hand_over(world: World, mesh: Mesh) -> Outcome:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=0.0, ignore_eos=True)
    reserved: dict[str, Reserved] = {}
    with steps_held(world.engines[WorkerRole.PREFILL]):
        for handoff in PROMPTS:
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            reserved[handoff] = await mesh.reserve(sampling, handoff)
            assert await mesh.run(reserved[handoff], sampling=sampling) == Accepted(handoff_id=handoff)
    first: dict[str, int] = {}
    errors: dict[str, ErrorInfo] = {}
    while len(first) + len(errors) < len(PROMPTS):
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        if finished.error is not None:
            errors[finished.handoff_id] = finished.error
        else:
            assert finished.first_token is not None
            first[finished.handoff_id] = finished.first_token
    await _ledgers_closed(world, mesh, first)

    dp_ranks, sent, helds = {}, {}, {}
    source = mesh.services["prefill-0"]
    for handoff, prompt in PROMPTS.items():
        sequence = source.table.get(handoff)
        assert sequence is not None
        assert sequence.memory is not None
        grant, own, length = reserved[handoff].grant, sequence.memory, len(prompt.token_ids)
        dp_ranks[handoff] = (sequence.dp_rank, grant.dp_rank)
        held = Held(block_ids=own.block_ids, slot=own.slot, num_tokens=length)
        sent[handoff] = world.gather(WorkerRole.PREFILL, sequence.dp_rank, held)
        helds[handoff] = Held(block_ids=grant.block_ids, slot=grant.slot, num_tokens=length)
    arrived = {h: world.gather(WorkerRole.DECODE, dp_ranks[h][1], held) for h, held in helds.items()}
    clean = all(
        untouched(
            world.manifests(WorkerRole.DECODE, dp_rank),
            world.memory(WorkerRole.DECODE, dp_rank),
            [held for handoff, held in helds.items() if dp_ranks[handoff][1] == dp_rank],
        )
        for dp_rank in range(world.sizes[WorkerRole.DECODE].dp)
    )

    for handoff, token in first.items():
        assert await mesh.commit(token, handoff) == Accepted(handoff_id=handoff)
    tokens: dict[str, list[int]] = {handoff: [] for handoff in first}
    finals = 0
    while finals < len(first):
        frame = await mesh.frames.get()
        assert frame.index == len(tokens[frame.handoff_id])
        tokens[frame.handoff_id] += frame.token_ids
        finals += frame.final
    for handoff in PROMPTS:
        await mesh.release("prefill", "prefill-0", handoff)
        await mesh.release("decode", "decode-0", handoff)
    return Outcome(tokens=tokens, dp_ranks=dp_ranks, sent=sent, arrived=arrived, clean=clean, errors=errors)


async def _ledgers_closed(world: World, mesh: Mesh, handoffs: Collection[str]) -> None:
    """Wait until every part of these handoffs has been reported, as the broker counts it."""
    manifests = [
        [manifest for dp_rank in range(size.dp) for manifest in world.manifests(role, dp_rank)]
        for role, size in world.sizes.items()
    ]
    planned = plan_workers(*manifests).parts
    while True:
        ledgers = {
            handoff: Ledger.open(
                planned, num_cached_tokens=0, num_prompt_tokens=len(PROMPTS[handoff].token_ids), block_size=16
            )
            for handoff in handoffs
        }
        for report in mesh.reports:
            if report.handoff_id in ledgers:
                ledgers[report.handoff_id] = ledgers[report.handoff_id].take(report)
        if all(ledger.closed for ledger in ledgers.values()):
            return
        await mesh.clock.sleep(0.01)


def distance(ours: Gathered, theirs: Gathered) -> float:
    """The largest difference of any element, as a part of the largest value of its tensor; both hold float32."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[key].view(np.float32), theirs[key].view(np.float32)) for key in ours]
    return max(float(np.abs(mine - other).max() / np.abs(other).max()) for mine, other in pairs)


FAN_IN = (Size(dp=2, tp=2), Size(dp=1, tp=1))
FAN_OUT = (Size(dp=1, tp=1), Size(dp=2, tp=2))


@pytest.mark.parametrize("world", [FAN_IN], indirect=True, ids=["dp2xtp2-to-tp1"])
async def test_two_replicas_of_two_ranks_hand_over_to_one_rank(world: World, unsharded: dict[str, Gathered]) -> None:
    """Each prompt is computed by its own replica; what arrives is to the bit what it holds, and the tokens are the reference's.

    Against one rank that computed the same chunks the caches differ by the order in which two ranks' sums are added.
    """
    outcome = await hand_over(world)
    assert outcome.dp_ranks == {"ra-0": (0, 0), "rb-0": (1, 0)}
    assert outcome.clean
    assert not outcome.errors
    for handoff, prompt in PROMPTS.items():
        assert outcome.tokens[handoff] == list(prompt.output_ids[:NUM_TOKENS])
        assert differing(outcome.arrived[handoff], outcome.sent[handoff]) == []
        assert distance(outcome.arrived[handoff], unsharded[handoff]) <= NOISE


@pytest.mark.parametrize("world", [FAN_OUT], indirect=True, ids=["tp1-to-dp2xtp2"])
async def test_one_rank_hands_over_to_two_replicas_of_two_ranks(world: World, unsharded: dict[str, Gathered]) -> None:
    """Each request arrives in the replica that granted it and nowhere else, to the bit what one rank computes by itself."""
    outcome = await hand_over(world)
    assert outcome.dp_ranks == {"ra-0": (0, 0), "rb-0": (0, 1)}
    assert outcome.clean
    assert not outcome.errors
    for handoff, prompt in PROMPTS.items():
        assert outcome.tokens[handoff] == list(prompt.output_ids[:NUM_TOKENS])
        assert differing(outcome.arrived[handoff], unsharded[handoff]) == []
    roles = {key.role for key in unsharded["ra-0"]}
    assert len(roles) == 4
    assert world.manifests(WorkerRole.DECODE, 0)[0].dtypes.key is Dtype.FLOAT32


@pytest.mark.parametrize("world", [FAN_OUT], indirect=True, ids=["tp1-to-dp2xtp2"])
async def test_a_push_into_another_replica_than_the_grant_names_is_refused_and_harms_nobody(
    world: World, unsharded: dict[str, Gathered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that always took the first replica would be seen: the second request fails, and none of its bytes lands anywhere.

    No generation is ever valid in two replicas, so that the first replica's fence refuses what the second one granted.
    """
    find = PeerTable.find

    def find_first(table: PeerTable, worker: WorkerRef, dp_rank: int) -> Peer:
        del dp_rank
        return find(table, worker, 0)

    monkeypatch.setattr(PeerTable, "find", find_first)
    outcome = await hand_over(world)
    assert outcome.dp_ranks == {"ra-0": (0, 0), "rb-0": (0, 1)}
    assert outcome.errors.keys() == {"rb-0"}
    assert outcome.errors["rb-0"].code is ErrorCode.TRANSFER_FAILED
    assert outcome.clean
    assert differing(outcome.arrived["ra-0"], unsharded["ra-0"]) == []
    assert len(differing(outcome.arrived["rb-0"], unsharded["rb-0"])) == len(unsharded["rb-0"])
    assert outcome.tokens["ra-0"] == list(PROMPTS["ra-0"].output_ids[:NUM_TOKENS])
