"""States on their way through a staging row: what lies in the slot at last is what a direct copy would have put there."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from common.layout.planner import plan
from common.layout.region import ALIGNMENT, RegionMap, lay_out
from common.layout.run import Run
from common.layout.shape import CacheShape, LayerType
from common.layout.slot_rows import bind_slot
from common.layout.staging import StagedStates
from common.layout.templates import SlotTemplate
from contracts.errors import InvalidValueError
from contracts.manifest import CacheDtypes, Coordinates, Dtype, PlannedPart, Role

SIZES = (1, 2, 3, 4, 6, 8)
STATES = (Role.CONV, Role.SSM)
NUM_ROWS = 3


def shape(num_speculative_tokens: int) -> CacheShape:
    """Heads that can be cut over every size; conv in 2 bytes, ssm in 4; a draft head, whose bootstrap is not staged."""
    return CacheShape(
        layer_types=(LayerType.LINEAR, LayerType.FULL, LayerType.LINEAR),
        num_kv_heads=24,
        head_dim=2,
        num_key_heads=24,
        num_value_heads=24,
        key_head_dim=1,
        value_head_dim=3,
        conv_kernel=4,
        dtypes=CacheDtypes(key=Dtype.BFLOAT16, value=Dtype.BFLOAT16, conv=Dtype.BFLOAT16),
        block_size=2,
        num_blocks=1,
        num_slots=3,
        num_speculative_tokens=num_speculative_tokens,
        num_draft_layers=1,
        hidden_size=5,
    )


def maps(dims: CacheShape, tp: int, num_rows: int = 0) -> list[RegionMap]:
    """The regions of all ranks of a worker."""
    return [lay_out(dims, Coordinates(tp_rank=rank, tp_size=tp), num_rows) for rank in range(tp)]


def copy(runs: list[Run], local: bytearray, remote: bytearray, *, to_remote: bool) -> None:
    """Perform runs, byte by byte of the formula."""
    for run in runs:
        for item in range(run.count):
            here = run.local_offset + item * run.local_stride
            there = run.remote_offset + item * run.remote_stride
            if to_remote:
                remote[there : there + run.length] = local[here : here + run.length]
            else:
                local[here : here + run.length] = remote[there : there + run.length]


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
@pytest.mark.parametrize(
    "sizes", [(src, dst) for src in SIZES for dst in SIZES], ids=lambda sizes: f"{sizes[0]}-{sizes[1]}"
)
def test_reading_and_merging_is_a_direct_copy(sizes: tuple[int, int], num_speculative_tokens: int) -> None:
    """For every pair of sizes: the row is filled without a gap, nothing but the row is touched before the merge, and the slot is right.

    The source guesses nothing, and has a row of states where the destination has one for each guess more.
    """
    sources, destinations = maps(shape(0), sizes[0]), maps(shape(num_speculative_tokens), sizes[1], NUM_ROWS)
    noise = random.Random(sum(sizes))
    memories = [bytearray(noise.randbytes(each.nbytes)) for each in sources]
    compiled = plan(
        [each.manifest(worker_id="p", incarnation="i", model="m", draft="h") for each in sources],
        [each.manifest(worker_id="d", incarnation="j", model="m", draft="h") for each in destinations],
    )
    assert Role.BOOTSTRAP in {template.part.role for template in compiled.templates}
    for rank, there in enumerate(destinations):
        templates = compiled.templates_into(rank)
        states = StagedStates(templates)
        assert states.row_bytes == there.staging.row_bytes
        wanted, found = bytearray(there.nbytes), bytearray(there.nbytes)
        base = there.staging.base(1)
        parts: set[PlannedPart] = set()
        touched: list[tuple[int, int]] = []
        for src_rank, memory in enumerate(memories):
            share = states.parts(STATES, src_rank)
            reads = states.reads(share, 2, base)
            copy(reads, found, memory, to_remote=False)
            touched += [
                (run.local_offset + item * run.length, run.local_offset + (item + 1) * run.length)
                for run in reads
                for item in range(run.count)
            ]
            parts |= share
            for template in templates:
                part = template.part
                if isinstance(template, SlotTemplate) and part.role in STATES and part.src_rank == src_rank:
                    copy(list(bind_slot(template, 2, 1)), memory, wanted, to_remote=True)
        touched.sort()
        assert (touched[0][0], touched[-1][1]) == (base, base + states.row_bytes)
        assert all(left[1] == right[0] for left, right in pairwise(touched))
        assert not any(found[: there.staging.offset])
        copy(states.merges(parts, 1, base), found, found, to_remote=True)
        end = there.staging.offset
        assert found[:end] == wanted[:end]
        assert any(wanted[:end])


def test_rows_lie_behind_the_caches_and_do_not_overlap() -> None:
    """Whole lines of memory each, in the region; without rows the region is what it was. A row that there is not is refused."""
    for rank in range(4):
        at = Coordinates(tp_rank=rank, tp_size=4)
        plain, staged = lay_out(shape(0), at), lay_out(shape(0), at, NUM_ROWS)
        rows = staged.staging
        assert staged.caches == plain.caches
        assert (rows.offset, plain.staging.nbytes) == (plain.nbytes, 0)
        bases = [rows.base(row) for row in range(NUM_ROWS)]
        assert all(base % ALIGNMENT == 0 for base in bases)
        assert all(left + rows.row_bytes <= right for left, right in pairwise(bases))
        assert bases[-1] + rows.row_bytes <= staged.nbytes
        assert staged.manifest(worker_id="d", incarnation="j", model="m").region_bytes == staged.nbytes
        for row in (-1, NUM_ROWS):
            with pytest.raises(InvalidValueError, match="staging_row"):
                rows.base(row)
    with pytest.raises(InvalidValueError, match="num_staging_rows"):
        lay_out(shape(0), Coordinates(), -1)
