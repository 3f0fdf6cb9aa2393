"""A decode rank that pulls, over the fake data plane, from a source whose memory is all of one number each."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork, FakeRegion, Fault, FaultKind
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import PeerDraft
from common.engine.transfer.pull_read import PullTarget
from common.engine.transfer.puller import Puller
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.sources import Source, connect_sources
from common.layout.region import lay_out
from common.layout.shape import CacheShape, LayerType
from common.runtime.clock import SystemClock
from contracts.handoff import Grant
from contracts.manifest import CacheDtypes, Coordinates, Dtype, Role
from contracts.pull import ShardState
from contracts.rank import AddPeerRank, BindSequence, PeerSide
from contracts.rank_pull import PullReport, PullShards, PullStopped, ShardPulled
from contracts.requests import SamplingParams, WorkerRef

CLOCK = SystemClock()


PATIENCE_S = 30.0


NUM_BLOCKS, NUM_SLOTS, NUM_ROWS = 8, 24, 20


NUM_CELLS = NUM_BLOCKS + NUM_SLOTS


STATES = (Role.CONV, Role.SSM)


GENERATION = 7


SHAPE = CacheShape(
    layer_types=(LayerType.LINEAR, LayerType.FULL, LayerType.LINEAR),
    num_kv_heads=2,
    head_dim=4,
    num_key_heads=4,
    num_value_heads=4,
    key_head_dim=4,
    value_head_dim=4,
    conv_kernel=4,
    dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
    block_size=2,
    num_blocks=NUM_BLOCKS,
    num_slots=NUM_SLOTS,
)


class World:
    """A decode rank alone, linked with a source of two ranks whose memory is all of one number each."""

    def __init__(self, failpoints: str = "") -> None:
        self.network = FakeNetwork()
        plane = FakeDataPlane(self.network, peer_id="d", incarnation="j", now=CLOCK.monotonic)
        peers = [
            FakeDataPlane(self.network, peer_id="p", incarnation=f"i{rank}", now=CLOCK.monotonic) for rank in (0, 1)
        ]
        maps = [lay_out(SHAPE, Coordinates(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
        self.there: list[FakeRegion] = [
            peer.allocate(each.nbytes, NUM_CELLS) for peer, each in zip(peers, maps, strict=True)
        ]
        for number, region in enumerate(self.there):
            region.data[:] = bytes([number + 1]) * len(region.data)
            region.set_generations(range(NUM_CELLS), GENERATION)
        self.map = lay_out(SHAPE, Coordinates(), NUM_ROWS)
        self.own = plane.allocate(self.map.nbytes, NUM_CELLS)
        draft = PeerDraft()
        worker = WorkerRef(worker_id="p", incarnation="i")
        own = self.map.manifest(worker_id="d", incarnation="j", model="m")
        draft.add(AddPeerRank(peer=worker, side=PeerSide.DESTINATION, manifest=own))
        for each, region in zip(maps, self.there, strict=True):
            manifest = each.manifest(worker_id="p", incarnation="i", model="m")
            draft.add(AddPeerRank(peer=worker, side=PeerSide.SOURCE, manifest=manifest, region=region.descriptor))
        self.source: Source
        (self.source,) = connect_sources(draft, 0, plane, CLOCK, threading.Event())
        points = parse_failpoints(failpoints)
        self.reports: SimpleQueue[PullReport] = SimpleQueue()
        self.puller = Puller(
            rank=0,
            clock=CLOCK,
            emit=self.reports.put,
            faults=PushFaults(points, plane),
            shaper=LinkShaper(points),
        )

    def begin(self, seq: int = 1, lock: int = 1, **changes: Any) -> None:
        """Pull sequence `seq`, whose slot and row have its number, from slot 2 and blocks 3 and 1 of the source."""
        grant = Grant(worker_id="p", incarnation="i", generation=GENERATION, block_ids=(3, 1), slot=2)
        values: dict[str, Any] = {
            "source": grant,
            "roles": STATES,
            "num_cached_tokens": 0,
            "parallel": True,
            "timeout_ms": 60_000,
        } | changes
        binding = BindSequence(
            seq=seq,
            handoff_id=f"h{seq}",
            generation=1,
            block_ids=(0, 5),
            slot=seq,
            num_prompt_tokens=3,
            sampling=SamplingParams(max_tokens=1, seed=1),
            staging_row=seq,
        )
        self.puller.begin(
            PullTarget(
                command=PullShards(seq=seq, lock=lock, **values),
                binding=binding,
                source=self.source,
                region=self.own,
                row_base=self.map.staging.base(seq),
                block_size=SHAPE.block_size,
            )
        )

    def told(self) -> list[PullReport]:
        """All reports up to the end of the next pull that ends."""
        found: list[PullReport] = []
        while not (found and isinstance(found[-1], PullStopped)):
            found.append(self.reports.get(timeout=PATIENCE_S))
        return found

    def until(self, *wanted: tuple[int | None, ShardState]) -> list[PullReport]:
        """Reports, until all that is wanted has been said of shards (None: of any)."""
        found: list[PullReport] = []
        while not all(
            any(source in {None, seen} and state is was for seen, was in states_of(found)) for source, state in wanted
        ):
            found.append(self.reports.get(timeout=PATIENCE_S))
        return found

    def slot(self, seq: int = 1) -> set[int]:
        """The different bytes that lie in the slot of a sequence."""
        found: set[int] = set()
        for (_, role, _), cache in self.map.caches.items():
            if role in STATES:
                start = cache.offset + seq * cache.entry_bytes
                found |= set(self.own.data[start : start + cache.entry_bytes])
        return found

    def hold(self) -> list[Fault]:
        """Keep the next two reads from copying until their gates are opened."""
        faults = [Fault(kind=FaultKind.HOLD), Fault(kind=FaultKind.HOLD)]
        self.network.plant(*faults)
        return faults


def states_of(reports: list[PullReport]) -> list[tuple[int, ShardState]]:
    """What was said of shards, in turn."""
    return [(report.shard.source_rank, report.shard.state) for report in reports if isinstance(report, ShardPulled)]


def error_of(reports: list[PullReport]) -> str:
    """What a pull ended with."""
    last = reports[-1]
    assert isinstance(last, PullStopped)
    return "" if last.error is None else f"{last.error.code}: {last.error.message}"
