"""Where the caches of a rank lie, and what its manifest says."""

from __future__ import annotations

import msgspec
import pytest

from common.layout.bind import bind_tokens
from common.layout.heads import even_shard, kv_shard
from common.layout.planner import plan
from common.layout.region import ALIGNMENT, lay_out
from common.layout.run import Run, as_reader
from common.layout.shape import CacheShape
from common.layout.slot_rows import bind_slot
from common.layout.templates import PagedTemplate, SlotTemplate
from contracts.codec import decode, encode
from contracts.errors import InvalidValueError
from contracts.manifest import Coordinates, Dtype, Namespace, RankManifest, Role
from tests.property.layout_world import Worker, make_shape

replace = msgspec.structs.replace


def test_caches_lie_one_behind_the_other_on_aligned_offsets() -> None:
    """No two caches share a byte, all are aligned, and the region ends behind the last one."""
    region = lay_out(make_shape(layers="llf", kv=3, hk=3, hv=6, draft=1), Coordinates(tp_rank=1, tp_size=3))
    end = 0
    for cache in region.caches.values():
        assert cache.offset % ALIGNMENT == 0
        assert cache.offset >= end
        end = cache.offset + cache.nbytes
    assert end <= region.nbytes < end + ALIGNMENT


def test_shapes_are_those_of_the_layout() -> None:
    """Local heads and channels, k more rows of CONV and k more checkpoints of SSM."""
    shape = make_shape(layers="lf", kv=4, hk=2, hv=4, depth=2, draft=1, dtype=Dtype.BFLOAT16)
    region = lay_out(shape, Coordinates(tp_rank=1, tp_size=2))
    assert region.cache(Role.KEY, 1).shape == (9, 2, 3, 2)
    assert region.cache(Role.VALUE, 0, Namespace.DRAFT).shape == (9, 2, 3, 2)
    assert region.cache(Role.CONV, 0).shape == (3, 5, 2 + 2 + 6)
    assert region.cache(Role.SSM, 0).shape == (3, 3, 2, 2, 3)
    assert region.cache(Role.CONV, 0).dtype is Dtype.BFLOAT16
    assert region.cache(Role.SSM, 0).dtype is Dtype.FLOAT32


def test_a_layer_without_the_role_is_an_error_that_names_it() -> None:
    """A full-attention layer has no CONV cache."""
    region = lay_out(make_shape(layers="lf"), Coordinates())
    with pytest.raises(InvalidValueError, match=r"layer: 1 is not allowed.*conv"):
        region.cache(Role.CONV, 1)


@pytest.mark.parametrize(
    ("kv", "hk", "at"),
    [
        (2, 2, Coordinates(tp_size=3)),
        (4, 4, Coordinates(tp_size=8)),
        (3, 4, Coordinates(tp_size=2)),
        (2, 2, Coordinates(tp_rank=2, tp_size=2)),
        (2, 2, Coordinates(tp_size=2, dcp_size=2)),
        (1, 2, Coordinates(tp_rank=1, tp_size=2, dcp_rank=0, dcp_size=2)),
    ],
)
def test_illegal_coordinates_are_refused(kv: int, hk: int, at: Coordinates) -> None:
    """Heads that cannot be cut that way, ranks that do not exist, context parallelism without replicas."""
    with pytest.raises(InvalidValueError):
        lay_out(make_shape(layers="lf", kv=kv, hk=hk, hv=hk), at)


@pytest.mark.parametrize(
    ("field", "value"), [("num_blocks", 0), ("conv_kernel", 1), ("num_speculative_tokens", -1), ("layer_types", ())]
)
def test_a_bad_shape_names_the_field(field: str, value: object) -> None:
    """Each dimension has a minimum."""
    with pytest.raises(InvalidValueError, match=field):
        replace(make_shape(), **{field: value})


def test_replicated_heads_lie_on_neighbours() -> None:
    """Eight ranks and two heads: the first four ranks hold head 0. Three ranks and six heads: two each."""
    assert [kv_shard(2, 8, rank).start for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [kv_shard(6, 3, rank) for rank in range(3)] == [(0, 2), (2, 2), (4, 2)]
    assert even_shard("num_value_heads", 6, 2, 1) == (3, 3)


def test_a_manifest_survives_the_wire() -> None:
    """Decoding what was encoded gives an equal manifest, and the plan made from it is equal."""
    shape = make_shape(layers="lf", kv=2, hk=2, hv=2, depth=1, draft=1)
    ours, theirs = Worker(shape, 2), Worker(shape, 1, name="decode-0")
    travelled = [decode(encode(manifest), RankManifest) for manifest in ours.manifests()]
    assert travelled == ours.manifests()
    assert plan(travelled, theirs.manifests()) == plan(ours.manifests(), theirs.manifests())


def templates(shape: CacheShape, tp: int) -> list[PagedTemplate | SlotTemplate]:
    """The templates between two workers of the same topology."""
    return list(plan(Worker(shape, tp).manifests(), Worker(shape, tp, name="decode-0").manifests()).templates)


def test_equal_cuts_need_one_copy_a_cache() -> None:
    """With the same cut on both sides Q, K and V are joined, and so are the rows: one run for CONV, one for consecutive blocks."""
    made = templates(make_shape(layers="lf", kv=2, hk=2, hv=2), 2)
    assert len(made) == 2 * 4
    for template in made:
        if isinstance(template, SlotTemplate):
            (run,) = bind_slot(template, 1, 2)
        else:
            (run,) = bind_tokens(template, [1, 2, 3], [4, 5, 6], 0, 9, 3)
        assert run.count == 1


def test_ids_that_do_not_exist_are_refused() -> None:
    """An id beyond the rank's blocks or slots would address another cache; a list too short has no block for a token."""
    made = templates(make_shape(layers="lf", depth=1), 1)
    key = next(t for t in made if isinstance(t, PagedTemplate))
    conv = next(t for t in made if isinstance(t, SlotTemplate))
    for src, dst, named in (
        ([8, 9], [1, 2], "src"),
        ([1, 2], [8, 9], "dst"),
        ([-1, 0], [1, 2], "src"),
        ([1], [1, 2], "src"),
    ):
        with pytest.raises(InvalidValueError, match=f"{named}_block_ids"):
            bind_tokens(key, src, dst, 0, 6, 3)
    with pytest.raises(InvalidValueError, match="block_size"):
        bind_tokens(key, [1], [1], 0, 1, 4)
    with pytest.raises(InvalidValueError, match="tokens"):
        bind_tokens(key, [1], [1], 2, 1, 3)
    with pytest.raises(InvalidValueError, match="src_slot"):
        bind_slot(conv, 3, 0)
    with pytest.raises(InvalidValueError, match="dst_row"):
        bind_slot(conv, 0, 0, dst_row=2)


def test_a_reader_sees_the_same_copy_from_the_other_side() -> None:
    """Local and remote change places, and turning twice changes nothing."""
    run = Run(local_offset=1, remote_offset=2, length=3, count=4, local_stride=5, remote_stride=6)
    turned = as_reader([run])
    assert turned == (Run(local_offset=2, remote_offset=1, length=3, count=4, local_stride=6, remote_stride=5),)
    assert as_reader(turned) == (run,)
