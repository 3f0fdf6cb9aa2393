"""What the ranks of an engine say to a release, one by one, and what becomes of it: memory is free when every rank has said so."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.dataplane import tcp_transfer
from common.dataplane.port import DataPlane, Outcome, TransferResult, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.dataplane.shm_remote import ShmRemoteRegion
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_region import TcpRegion
from common.engine.port import EngineError
from common.engine.ranks.group import RankGroup
from common.layout.run import Run
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor
from contracts.handoff import GRANT_SECRET_BYTES
from contracts.rank import BindSequence, Done
from tests.integration.cache_bytes import Memories, poison
from tests.integration.engine_world import binding
from tests.integration.handoff_pairs import NUM_BLOCKS, Worker, start_worker
from tests.integration.held_transfers import PATIENCE_S, Gate

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_BYTES = 4096
NUM_IDS = 3


@dataclass(kw_only=True)
class Writers:
    """Peers that write into the ranks of `worker`, each held as soon as its grant has been found valid."""

    worker: Worker
    plane: DataPlane
    pool: ThreadPoolExecutor
    bindings: dict[int, BindSequence] = field(default_factory=dict)
    _gates: dict[tuple[RegionDescriptor, int], Gate] = field(default_factory=dict)
    _writes: dict[tuple[int, int], Future[TransferResult]] = field(default_factory=dict)

    def gate(self, region: RegionDescriptor, generation: int) -> Gate | None:
        """What holds writes into a region under the grant of that number."""
        return self._gates.get((region, generation))

    async def bind(self, seq: int) -> None:
        """Give a sequence memory of its own on all ranks."""
        first = NUM_IDS * seq
        made = binding(
            seq,
            5,
            block_ids=tuple(range(first, first + NUM_IDS)),
            generation=self.worker.next_generation(),
            secret=secrets.token_hex(GRANT_SECRET_BYTES),
        )
        await self.worker.group.bind(made)
        self.bindings[seq] = made

    async def begin(self, seq: int, rank: int) -> None:
        """Write into what a sequence has on one rank; it is held there when this returns."""
        bound, region = self.bindings[seq], self._region(rank)
        gate = self._gates[region, bound.generation] = Gate()
        self._writes[seq, rank] = self.pool.submit(self._write, region, bound)
        await gate.reached()

    async def end(self, seq: int, rank: int) -> None:
        """Let a writer go on. Its grant was taken back under way: it fails, and has stopped when this returns."""
        self._gates[self._region(rank), self.bindings[seq].generation].opened.set()
        result = await asyncio.wrap_future(self._writes.pop((seq, rank)))
        assert (result.outcome, result.is_stale) == (Outcome.FAILED_QUIESCED, True)

    async def release(self, *seqs: int) -> frozenset[int]:
        """Release sequences without waiting for anybody."""
        return await self.worker.group.release(seqs, self.worker.next_generation(), 0)

    async def seqs(self) -> list[tuple[int, ...]]:
        """The sequences that each rank keeps memory for."""
        return [scan.seqs for scan in await self.worker.group.scan()]

    def open_all(self) -> None:
        """Hold nobody any more."""
        for gate in self._gates.values():
            gate.opened.set()

    def _region(self, rank: int) -> RegionDescriptor:
        region = self.worker.info.ranks[rank].region
        assert region is not None
        return region

    def _write(self, region: RegionDescriptor, bound: BindSequence) -> TransferResult:
        deadline = SystemClock().monotonic() + PATIENCE_S
        own, remote = self.plane.allocate(NUM_BYTES, 1), self.plane.connect(region, deadline)
        slot_cell = NUM_BLOCKS + bound.slot
        grant = WriteGrant(
            lock_cell=slot_cell,
            cells=(*bound.block_ids, slot_cell),
            generation=bound.generation,
            secret=bytes.fromhex(bound.secret),
        )
        return remote.write([Run(local_offset=0, remote_offset=0, length=NUM_BYTES)], own, grant, deadline)


@contextmanager
def held(writers: Writers, transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold all writes that `writers` has a gate for; none is held afterwards."""
    copy, enter = ShmRemoteRegion._copy, TcpRegion.enter

    def hold(region: RegionDescriptor, generation: int) -> None:
        gate = writers.gate(region, generation)
        if gate is not None:
            gate.before(lambda: None)()

    def copy_held(remote: Any, batch: Any, local: Any, cells: Any, generation: int, *rest: Any, **named: Any) -> Any:
        hold(remote.descriptor, generation)  # the writer has the lock
        return copy(remote, batch, local, cells, generation, *rest, **named)

    def enter_held(region: Any, grant: WriteGrant, connection: Any) -> Any:
        landing = enter(region, grant, connection)
        hold(region.descriptor, grant.generation)  # the owner has let it in
        return landing

    with monkeypatch.context() as patch:
        if transport == "shm":
            patch.setattr(ShmRemoteRegion, "_copy", copy_held)
        else:
            patch.setattr(TcpRegion, "enter", enter_held)
            patch.setattr(tcp_transfer, "SILENCE_S", PATIENCE_S)
        try:
            yield
        finally:
            writers.open_all()


@asynccontextmanager
async def written(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, *, tp: int, transport: str = "shm"
) -> AsyncIterator[tuple[Writers, Callable[[], bool]]]:
    """An engine of `tp` ranks and its writers, and whether none of its bytes is another than when all sequences had been bound.

    There is a sequence for each rank, into which a writer is held at that rank alone, and one that is written on all ranks, and one
    on none; their numbers are in this order.
    """
    memories, now = Memories(), SystemClock().monotonic
    worker = await start_worker("d", SHIPPED, sockets, tp, memories=memories, transport=transport)
    plane: DataPlane = (
        ShmDataPlane(sockets, peer_id="w", incarnation="i1", now=now)
        if transport == "shm"
        else TcpDataPlane("127.0.0.1", peer_id="w", incarnation="i1", now=now)
    )
    try:
        poison(memories.of("d"))
        with ThreadPoolExecutor(2 * tp) as pool:
            writers = Writers(worker=worker, plane=plane, pool=pool)
            with held(writers, transport, monkeypatch):
                for seq in range(tp + 2):
                    await writers.bind(seq)
                before = [bytes(memory) for memory in memories.of("d")]
                for rank in range(tp):
                    await writers.begin(rank, rank)
                    await writers.begin(tp, rank)
                yield writers, lambda: [bytes(memory) for memory in memories.of("d")] == before
    finally:
        plane.close()
        await worker.group.stop()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("tp", [2, 4])
async def test_what_one_rank_cannot_give_back_none_has_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, transport: str
) -> None:
    """A writer at any one rank keeps the sequence, whatever the others say; it is free when its last writer is gone, not before."""
    async with written(tmp_path, monkeypatch, tp=tp, transport=transport) as (writers, unchanged):
        everywhere, nowhere, ranks = tp, tp + 1, range(tp)
        assert await writers.release(*ranks, everywhere, nowhere) == {*ranks, everywhere}
        assert await writers.seqs() == [(rank, everywhere) for rank in ranks]
        for rank in ranks:
            taken = writers.bindings[rank]
            again = msgspec.structs.replace(taken, seq=50, generation=writers.worker.next_generation())
            with pytest.raises(EngineError, match=rf"held by sequence {rank} \(on 1 of {tp} ranks\)"):
                await writers.worker.group.bind(again)
            assert await writers.release(rank) == {rank}
            await writers.end(rank, rank)
            assert await writers.release(rank) == frozenset()
        for rank in ranks:
            assert await writers.release(everywhere) == {everywhere}
            await writers.end(everywhere, rank)
        assert await writers.release(everywhere) == frozenset()
        assert await writers.seqs() == [()] * tp
        assert unchanged()


def _of_the_first(answers: tuple[Done, ...]) -> tuple[Done, ...]:
    """A fault: what one rank has said is taken for all."""
    return answers[:1]


def _of_all_alike(answers: tuple[Done, ...]) -> tuple[Done, ...]:
    """A fault: only what all ranks say counts."""
    common = reduce(frozenset.intersection, (frozenset(answer.indeterminate) for answer in answers))
    return tuple(msgspec.structs.replace(answer, indeterminate=tuple(common)) for answer in answers)


@pytest.mark.parametrize(("verdict", "kept"), [(_of_the_first, {0, 2}), (_of_all_alike, {2})])
async def test_a_verdict_without_every_rank_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Callable[[tuple[Done, ...]], tuple[Done, ...]],
    kept: set[int],
) -> None:
    """The test above can fail: what another rank keeps would be said to be free."""
    tell = RankGroup._tell

    async def tell_some(group: RankGroup, *rest: Any) -> tuple[Done, ...]:
        return verdict(await tell(group, *rest))

    async with written(tmp_path, monkeypatch, tp=2) as (writers, _):
        monkeypatch.setattr(RankGroup, "_tell", tell_some)
        assert await writers.release(0, 1, 2, 3) == kept
        assert await writers.seqs() == [(0, 2), (1, 2)]
