"""One transfer for several parts: what it touches, what it needs the grant for, and what refuses it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork, FakeRegion
from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_write import PushPart, write_parts
from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from common.layout.planner import plan
from common.layout.region import RegionMap, lay_out
from common.layout.shape import CacheShape, LayerType
from common.runtime.clock import SystemClock
from contracts.handoff import Grant
from contracts.manifest import CacheDtypes, Coordinates, Dtype, PlannedPart, RankManifest, Role

NOW = SystemClock().monotonic
GRANT = Grant(worker_id="d", incarnation="j", generation=7, block_ids=(5, 1, 3, 6), slot=2)
SOURCE_IDS, SOURCE_SLOT = (0, 4, 2, 7), 0
SHAPE = CacheShape(
    layer_types=(LayerType.LINEAR, LayerType.FULL),
    num_kv_heads=2,
    head_dim=4,
    num_key_heads=4,
    num_value_heads=4,
    key_head_dim=4,
    value_head_dim=4,
    conv_kernel=4,
    dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
    block_size=2,
    num_blocks=8,
    num_slots=3,
)


class World:
    """A source with one rank, a destination with two that may share blocks as a context-parallel group."""

    def __init__(self, dcp: int) -> None:
        network = FakeNetwork()
        tp = 2 * dcp
        here = FakeDataPlane(network, peer_id="p", incarnation="i", now=NOW)
        maps = [lay_out(SHAPE, Coordinates(tp_rank=r, tp_size=tp, dcp_rank=r % dcp, dcp_size=dcp)) for r in range(tp)]
        origin = lay_out(SHAPE, Coordinates())
        made = plan([manifest(origin, "p")], [manifest(each, "d") for each in maps])
        owner = FakeDataPlane(network, peer_id="d", incarnation="j", now=NOW)
        self.there: list[FakeRegion] = [owner.allocate(each.nbytes, 11) for each in maps]
        for region in self.there:
            region.set_generations([*GRANT.block_ids, 8 + GRANT.slot], 7)
        self.source = here.allocate(origin.nbytes, 11)
        self.source.data[:] = bytes(1 + index % 255 for index in range(origin.nbytes))
        remotes = {rank: here.connect(region.descriptor, NOW() + 60) for rank, region in enumerate(self.there)}
        self.peer = Peer(parts={}, templates=(), regions=dict(remotes), num_blocks=8, num_slots=3)
        by_part: dict[PlannedPart, PartCopies] = {
            part: PartCopies(part, [each for each in made.templates if each.part == part]) for part in made.parts
        }
        self.copies = tuple(by_part.values())

    def write(self, chunk: TokenChunk, *roles: Role, rank: int = 0, grant: Grant = GRANT) -> TransferResult:
        """Write the parts of these roles for one destination rank."""
        parts = [
            PushPart(copies=each, chunk=None if each.is_state else chunk, slot=SOURCE_SLOT)
            for each in self.copies
            if each.part.role in roles and each.part.dst_rank == rank
        ]
        result = write_parts(self.peer, rank, grant, parts, self.source, None, NOW() + 60)
        if result.outcome is Outcome.DONE:
            assert result.nbytes == sum(part.num_bytes for part in parts)
            assert result.nbytes == sum(byte != 0 for byte in self.there[rank].data)
        return result


def manifest(region_map: RegionMap, worker_id: str) -> RankManifest:
    """What one rank publishes."""
    return region_map.manifest(worker_id=worker_id, incarnation="i", model="m")


def chunk(start: int, end: int) -> TokenChunk:
    """Some tokens of the sequence."""
    return TokenChunk(SOURCE_IDS, GRANT.block_ids, start, end, SHAPE.block_size)


@pytest.fixture
def world() -> World:
    """Two destination ranks with a head each."""
    return World(1)


def test_all_parts_of_a_batch_arrive_with_the_bytes_that_are_reported(world: World) -> None:
    """States and tokens in one transfer: as many bytes land as the parts say, and none anywhere else."""
    result = world.write(chunk(1, 7), *Role)
    assert (result.outcome, result.nbytes) == (Outcome.DONE, 2 * 6 * 16 + 3 * 24 * 4 + 2 * 4 * 4 * 4)


@pytest.mark.parametrize(
    ("block", "outcome"), [(5, Outcome.DONE), (1, Outcome.FAILED_QUIESCED), (3, Outcome.FAILED_QUIESCED)]
)
def test_each_block_that_is_touched_needs_the_grant(world: World, block: int, outcome: Outcome) -> None:
    """One block with a newer owner refuses the whole batch; a block that these tokens do not touch does not."""
    world.there[0].set_generations([block], 8)
    assert world.write(chunk(2, 5), *Role).outcome is outcome
    if outcome is not Outcome.DONE:
        assert not any(world.there[0].data)


def test_a_newer_owner_of_the_slot_refuses_tokens_too(world: World) -> None:
    """The slot's cell stands for the request."""
    world.there[0].set_generations([8 + GRANT.slot], 8)
    assert world.write(chunk(0, 2), Role.KEY).outcome is Outcome.FAILED_QUIESCED


def test_states_alone_touch_no_block(world: World) -> None:
    """Only the slot's generation counts for them."""
    world.there[0].set_generations(GRANT.block_ids, 8)
    assert world.write(chunk(0, 2), Role.CONV, Role.SSM).outcome is Outcome.DONE


def test_under_context_parallelism_only_owned_blocks_count() -> None:
    """Of blocks 0 to 3 of the sequence, rank 1 of a group of two holds 1 and 3, as the grant's first two."""
    world = World(2)
    world.there[1].set_generations([3, 6], 8)
    assert world.write(chunk(0, 8), Role.KEY, Role.VALUE, rank=1) == TransferResult(
        outcome=Outcome.DONE, nbytes=2 * 4 * 16
    )
    world.there[1].set_generations([1], 8)
    assert world.write(chunk(0, 8), Role.KEY, Role.VALUE, rank=1).outcome is Outcome.FAILED_QUIESCED


@pytest.mark.parametrize("wrong", [{"block_ids": (5, 8, 3, 6)}, {"slot": 3}, {"block_ids": (5,)}])
def test_a_grant_that_names_what_does_not_exist_fails_with_a_reason(world: World, wrong: dict[str, Any]) -> None:
    """Nothing is raised in the pusher's thread, nothing is written, and the report says why."""
    grant = msgspec.structs.replace(GRANT, **wrong)
    tokens = TokenChunk(SOURCE_IDS, grant.block_ids, 0, 8, SHAPE.block_size)
    result = world.write(tokens, *Role, grant=grant)
    assert (result.outcome, "InvalidValueError" in result.reason) == (Outcome.FAILED_QUIESCED, True)
    assert not any(world.there[0].data)
