"""Reading one shard: what one source rank holds for this rank, in one transfer under the source's grant."""

from __future__ import annotations

from dataclasses import dataclass

from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.merge import fill_zeros
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_write import PushPart
from common.engine.transfer.sources import Source
from common.layout.bind import TokenChunk
from common.layout.context_parallel import owned_blocks
from common.layout.joining import pattern_of
from common.layout.part_copies import PartCopies
from common.layout.reading import placed_for_reader
from common.layout.run_batch import Placed, RunBatch
from contracts.manifest import Namespace, PlannedPart
from contracts.rank import BindSequence
from contracts.rank_pull import PulledPart, PullShards


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
    """The parts that are read from one source rank: states into the staging row, all others straight into their places."""

    src_rank: int
    states: frozenset[PlannedPart]
    direct: tuple[PartCopies, ...]

    @property
    def parts(self) -> tuple[PlannedPart, ...]:
        """All of them."""
        return (*self.states, *(copies.part for copies in self.direct))


def shards_of(target: PullTarget, faults: PushFaults) -> list[Shard]:
    """The shards of a pull, by source rank; a source rank that holds nothing of what is pulled has none. Without what is dropped."""
    command, source = target.command, target.source
    chunks = _Chunks(target)
    found = []
    for src_rank in sorted(source.regions):
        states = source.states.parts(command.roles, src_rank)
        direct = source.direct.get(src_rank, ())
        shard = Shard(
            src_rank=src_rank,
            states=frozenset(part for part in states if not faults.is_dropped(part)),
            direct=tuple(
                copies
                for copies in direct
                if copies.part.role in command.roles and chunks.moves(copies) and not faults.is_dropped(copies.part)
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
        return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=reason_of(error, "a pull"))


def _read(shard: Shard, target: PullTarget, faults: PushFaults, deadline: float) -> TransferResult:
    grant, states = target.command.source, target.source.states
    chunks = _Chunks(target)
    zeroed = frozenset(part for part in shard.states if faults.is_state_zeroed(part))
    own: list[Placed] = []
    blank: list[Placed] = []
    if runs := states.reads(shard.states - zeroed, grant.slot, target.row_base):
        own.append(Placed(pattern_of(runs)))
    if runs := states.reads(zeroed, grant.slot, target.row_base):
        blank.append(Placed(pattern_of(runs)))
    direct: list[Placed] = []
    blocks: dict[int, None] = {}
    for copies in shard.direct:
        chunk = chunks.of(copies)
        part = PushPart(copies=copies, chunk=chunk, slot=grant.slot)
        if faults:
            sound, zeros = faults.writes(part, target.binding.slot)
            direct += sound
            blank += placed_for_reader(zeros)
        else:
            direct += part.place(target.binding.slot)
        if chunk is not None:
            share = copies.part.modulus, copies.part.residue
            owned = owned_blocks(chunk.start, chunk.end, chunk.block_size, *share)
            blocks |= dict.fromkeys(grant.block_ids[block] for block in owned)
    own += placed_for_reader(direct)
    slot_cell = target.source.num_blocks + grant.slot
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
    """What a shard that is there says of what was read straight into its place; parts of which this rank owns no token are left out."""
    chunks = _Chunks(target)
    parts = (PushPart(copies=copies, chunk=chunks.of(copies), slot=0) for copies in shard.direct)
    return tuple(pulled_part(part.copies.part, part.ranges) for part in parts if part.ranges)


def pulled_part(part: PlannedPart, ranges: tuple[tuple[int, int], ...] = ((0, 1),)) -> PulledPart:
    """A part as the parent is told of it."""
    return PulledPart(
        namespace=part.namespace, role=part.role, layer=part.layer, source_rank=part.src_rank, ranges=ranges
    )


class _Chunks:
    """The tokens of a pull, of the model's own caches and of the draft's, which have no token 0."""

    def __init__(self, target: PullTarget) -> None:
        command, binding = target.command, target.binding
        start, end = command.num_cached_tokens, binding.num_prompt_tokens

        def chunk(first: int) -> TokenChunk:
            ids = command.source.block_ids, binding.block_ids
            return TokenChunk(*ids, first, max(first, end), target.block_size)

        own = chunk(start)
        self._by_namespace = {Namespace.TARGET: own, Namespace.DRAFT: own if start else chunk(1)}

    def of(self, copies: PartCopies) -> TokenChunk | None:
        """The tokens of a part; None for one that has a slot."""
        return None if copies.is_state else self._by_namespace[copies.part.namespace]

    def moves(self, copies: PartCopies) -> bool:
        """Whether there is anything of a part to be read."""
        chunk = self.of(copies)
        return chunk is None or chunk.start < chunk.end
