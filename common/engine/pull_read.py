"""Reading one shard: what one source rank holds for this rank, in one transfer under the source's grant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.engine.merge import fill_zeros
from common.engine.push_faults import PushFaults
from common.engine.push_write import PushPart
from common.engine.sources import Source
from common.layout.bind import TokenChunk
from common.layout.context_parallel import owned_blocks
from common.layout.joining import pattern_of
from common.layout.part_copies import PartCopies
from common.layout.reading import placed_for_reader
from common.layout.run_batch import Placed, RunBatch
from contracts.manifest import PlannedPart, Role
from contracts.rank import BindSequence, PulledPart, PullShards

STATES: Final = (Role.CONV, Role.SSM)


@dataclass(frozen=True, kw_only=True)
class PullTarget:
    """What is pulled, and where it goes: into `region`, the states into the staging row that begins at `row_base`."""

    command: PullShards
    binding: BindSequence
    source: Source
    region: Region
    row_base: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The parts that are read from one source rank: states, and KEY and VALUE of some tokens."""

    src_rank: int
    states: frozenset[PlannedPart]
    tokens: tuple[PartCopies, ...]

    @property
    def parts(self) -> tuple[PlannedPart, ...]:
        """All of them."""
        return (*self.states, *(copies.part for copies in self.tokens))


def shards_of(target: PullTarget, faults: PushFaults) -> list[Shard]:
    """The shards of a pull, by source rank; a source rank that holds nothing of what is pulled has none. Without what is dropped."""
    command, source = target.command, target.source
    has_tokens = command.num_cached_tokens < target.binding.num_prompt_tokens
    found = []
    for src_rank in sorted(source.regions):
        states = source.states.parts(command.roles, src_rank)
        tokens = source.tokens.get(src_rank, ()) if has_tokens else ()
        shard = Shard(
            src_rank=src_rank,
            states=frozenset(part for part in states if not faults.is_dropped(part)),
            tokens=tuple(
                copies for copies in tokens if copies.part.role in command.roles and not faults.is_dropped(copies.part)
            ),
        )
        if shard.parts:
            found.append(shard)
    return found


def read_shard(shard: Shard, target: PullTarget, faults: PushFaults, deadline: float) -> TransferResult:
    """Read all parts of a shard; never raises: what cannot be read has failed, and nothing is being written.

    DONE only when the source's cells still held the grant's generation after the last byte.
    """
    try:
        if any(faults.is_failed(part) for part in shard.parts):
            return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="planted by a failpoint")
        return _read(shard, target, faults, deadline)
    except Exception as error:  # noqa: BLE001 - whatever it was, nothing is being written, and the parent must hear of it
        return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=f"{type(error).__name__}: {error}")


def _read(shard: Shard, target: PullTarget, faults: PushFaults, deadline: float) -> TransferResult:
    grant, states = target.command.source, target.source.states
    chunk = _chunk_of(target)
    zeroed = frozenset(part for part in shard.states if faults.is_state_zeroed(part))
    own: list[Placed] = []
    blank: list[Placed] = []
    if runs := states.reads(shard.states - zeroed, grant.slot, target.row_base):
        own.append(Placed(pattern_of(runs)))
    if runs := states.reads(zeroed, grant.slot, target.row_base):
        blank.append(Placed(pattern_of(runs)))
    tokens: list[Placed] = []
    for copies in shard.tokens:
        if faults:
            sound, zeros = faults.writes(PushPart(copies=copies, chunk=chunk, slot=grant.slot), target.binding.slot)
            tokens += sound
            blank += placed_for_reader(zeros)
        else:
            tokens += copies.place_tokens(chunk)
    own += placed_for_reader(tokens)
    slot_cell = target.source.num_blocks + grant.slot
    blocks = dict.fromkeys(
        grant.block_ids[block]
        for modulus, residue in {(copies.part.modulus, copies.part.residue) for copies in shard.tokens}
        for block in owned_blocks(chunk.start, chunk.end, chunk.block_size, modulus, residue)
    )
    result = target.source.regions[shard.src_rank].read(
        RunBatch(own),
        target.region,
        WriteGrant(
            lock_cell=slot_cell,
            cells=(slot_cell, *blocks),
            generation=grant.generation,
            secret=bytes.fromhex(grant.secret),
        ),
        deadline,
    )
    if result.outcome is Outcome.DONE:
        fill_zeros(target.region.data, RunBatch(blank))
    return result


def pulled_parts(shard: Shard, target: PullTarget) -> tuple[PulledPart, ...]:
    """What a shard that is there says of KEY and VALUE; parts of which this rank owns no token are left out."""
    chunk = _chunk_of(target)
    found = ((copies.part, copies.token_ranges(chunk)) for copies in shard.tokens)
    return tuple(pulled_part(part, ranges) for part, ranges in found if ranges)


def pulled_part(part: PlannedPart, ranges: tuple[tuple[int, int], ...] = ((0, 1),)) -> PulledPart:
    """A part as the parent is told of it."""
    return PulledPart(
        namespace=part.namespace, role=part.role, layer=part.layer, source_rank=part.src_rank, ranges=ranges
    )


def _chunk_of(target: PullTarget) -> TokenChunk:
    command, binding = target.command, target.binding
    end = max(command.num_cached_tokens, binding.num_prompt_tokens)
    return TokenChunk(command.source.block_ids, binding.block_ids, command.num_cached_tokens, end, target.block_size)
