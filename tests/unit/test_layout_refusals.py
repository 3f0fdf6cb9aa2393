"""What the planner refuses, each by the name of its rule."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from common.layout.planner import plan
from common.layout.refusal import PlanRefusedError, PlanRule
from contracts.errors import ErrorCode
from contracts.manifest import (
    CacheDtypes,
    Coordinates,
    Dtype,
    Namespace,
    PagedPlace,
    RankManifest,
    Role,
    SlotPlace,
    Span,
)
from tests.property.layout_world import Worker, make_shape

Manifests = list[RankManifest]
replace = msgspec.structs.replace


def source() -> Manifests:
    """Two ranks of a hybrid model."""
    return Worker(make_shape(layers="lf", kv=2, hk=2, hv=2), 2).manifests()


def destination() -> Manifests:
    """One rank of the same model."""
    return Worker(make_shape(layers="lf", kv=2, hk=2, hv=2), 1, name="decode-0").manifests()


def on_all(manifests: Manifests, **changes: object) -> Manifests:
    """All ranks with some fields replaced."""
    return [replace(manifest, **changes) for manifest in manifests]


def on_spans(manifests: Manifests, change: Callable[[Span], Span | None], rank: int = 0) -> Manifests:
    """One rank with every span changed, or dropped for None."""
    spans = tuple(new for span in manifests[rank].spans if (new := change(span)) is not None)
    return [replace(m, spans=spans) if i == rank else m for i, m in enumerate(manifests)]


def place(role: Role, **changes: int) -> Callable[[Span], Span]:
    """Replace fields of the place of each span of `role`."""

    def change(span: Span) -> Span:
        return replace(span, place=replace(span.place, **changes)) if span.key.role is role else span

    return change


def at(manifest: RankManifest, **changes: int) -> RankManifest:
    """The rank with other coordinates."""
    return replace(manifest, coordinates=replace(manifest.coordinates, **changes))


def moved_onto(span: Span, first: Span, role: Role) -> Span:
    """A span of `role` put where `first` lies."""
    return replace(span, place=replace(span.place, offset=first.place.offset)) if span.key.role is role else span


def refused(src: Manifests, dst: Manifests) -> PlanRefusedError:
    """The refusal that planning ends in."""
    with pytest.raises(PlanRefusedError) as caught:
        plan(src, dst)
    return caught.value


def test_matching_workers_are_not_refused() -> None:
    """The manifests that the other tests spoil are fine."""
    assert plan(source(), destination()).parts


SPOILED_SOURCES: list[tuple[str, PlanRule, Callable[[Manifests], Manifests]]] = [
    ("no rank at all", PlanRule.RANKS, lambda _: []),
    ("a rank is missing", PlanRule.RANKS, lambda m: m[:1]),
    ("a rank is there twice", PlanRule.RANKS, lambda m: [m[0], m[0], m[1]]),
    ("a rank is replaced by another", PlanRule.RANKS, lambda m: [m[0], m[0]]),
    ("two workers are mixed", PlanRule.WORKER, lambda m: [m[0], replace(m[1], worker_id="prefill-1")]),
    ("two starts are mixed", PlanRule.WORKER, lambda m: [m[0], replace(m[1], incarnation="i1")]),
    ("two replicas are mixed", PlanRule.WORKER, lambda m: [at(m[0], dp_size=2), at(m[1], dp_size=2, dp_rank=1)]),
    (
        "all ranks of two replicas",
        PlanRule.WORKER,
        lambda m: [at(r, dp_size=2, dp_rank=number) for number in (0, 1) for r in m],
    ),
    ("ranks disagree about replicas", PlanRule.FINGERPRINT, lambda m: [m[0], at(m[1], dp_size=2)]),
    ("a replica that does not exist", PlanRule.RANKS, lambda m: [at(r, dp_size=2, dp_rank=2) for r in m]),
    ("a negative replica", PlanRule.RANKS, lambda m: [at(r, dp_rank=-1) for r in m]),
    ("more ranks than anybody has", PlanRule.RANKS, lambda m: [at(r, tp_size=2**62) for r in m]),
    ("a negative rank", PlanRule.RANKS, lambda m: [m[0], at(m[1], tp_rank=-1)]),
    ("ranks disagree about a block", PlanRule.FINGERPRINT, lambda m: [m[0], replace(m[1], block_size=16)]),
    ("ranks disagree about capacity", PlanRule.FINGERPRINT, lambda m: [m[0], replace(m[1], num_blocks=5)]),
    ("a newer schema", PlanRule.SCHEMA_VERSION, lambda m: [m[0], replace(m[1], schema_version=3)]),
    ("an interleave of its own", PlanRule.INTERLEAVE, lambda m: on_all(m, interleave=6)),
    ("another model", PlanRule.MODEL, lambda m: on_all(m, model="other")),
    ("a draft without its caches", PlanRule.TENSORS, lambda m: on_all(m, draft="other")),
    ("an older schema", PlanRule.SCHEMA_VERSION, lambda m: on_all(m, schema_version=0)),
    (
        "no dcp at the source",
        PlanRule.CONTEXT_PARALLEL,
        lambda m: [at(r, dcp_size=2, dcp_rank=i) for i, r in enumerate(m)],
    ),
    ("a wrong dcp rank", PlanRule.CONTEXT_GROUP, lambda m: [at(r, dcp_size=2, dcp_rank=0) for r in m]),
    ("no spans", PlanRule.TENSORS, lambda m: on_all(m, spans=())),
    (
        "a layer is missing",
        PlanRule.TENSORS,
        lambda m: [on_spans([r], lambda s: None if s.key.role is Role.SSM else s)[0] for r in m],
    ),
    ("a hole in front", PlanRule.GAP, lambda m: on_spans(m, lambda s: None if s.key.role is Role.KEY else s)),
    ("a hole at the end", PlanRule.GAP, lambda m: on_spans(m, lambda s: None if s.key.role is Role.KEY else s, rank=1)),
    (
        "intervals that cross",
        PlanRule.OVERLAP,
        lambda m: on_spans(m, lambda s: replace(s, start=s.start - 1) if s.key.role is Role.CONV else s, rank=1),
    ),
    ("one interval twice", PlanRule.OVERLAP, lambda m: [replace(m[0], spans=(*m[0].spans, m[0].spans[0])), m[1]]),
    (
        "two caches share bytes",
        PlanRule.OVERLAP,
        lambda m: on_spans(m, lambda s: moved_onto(s, m[0].spans[-2], Role.VALUE)),
    ),
    (
        "segments share bytes",
        PlanRule.OVERLAP,
        lambda m: on_spans(m, lambda s: moved_onto(s, m[0].spans[0], Role.CONV)),
    ),
    ("rows share bytes", PlanRule.OVERLAP, lambda m: on_spans(m, place(Role.CONV, row_stride=4))),
    ("slots share bytes", PlanRule.OVERLAP, lambda m: on_spans(m, place(Role.SSM, slot_stride=4))),
    ("blocks share bytes", PlanRule.OVERLAP, lambda m: on_spans(m, place(Role.KEY, block_stride=8))),
    ("an offset beyond 63 bits", PlanRule.OVERFLOW, lambda m: on_spans(m, place(Role.KEY, offset=2**63))),
    ("a negative offset", PlanRule.OVERFLOW, lambda m: on_spans(m, place(Role.KEY, offset=-64))),
    ("an end beyond 63 bits", PlanRule.OVERFLOW, lambda m: on_spans(m, place(Role.SSM, slot_stride=2**62))),
    ("an empty span", PlanRule.OVERFLOW, lambda m: on_spans(m, lambda s: replace(s, length=0))),
    ("no blocks", PlanRule.OVERFLOW, lambda m: on_all(m, num_blocks=0)),
    ("an end behind the region", PlanRule.BOUNDS, lambda m: on_all(m, region_bytes=m[0].region_bytes - 64)),
    ("blocks behind the region", PlanRule.BOUNDS, lambda m: on_all(m, num_blocks=99)),
    ("heads of another size", PlanRule.UNIT, lambda m: on_spans(m, place(Role.VALUE, head_bytes=8))),
    ("half an element", PlanRule.UNIT, lambda m: on_spans(m, place(Role.CONV, unit_bytes=2))),
    ("more rows than there are", PlanRule.UNIT, lambda m: on_spans(m, place(Role.CONV, moved_rows=4))),
    ("rows that differ", PlanRule.UNIT, lambda m: on_spans(m, place(Role.CONV, moved_rows=2))),
]


@pytest.mark.parametrize(
    ("rule", "spoil"), [row[1:] for row in SPOILED_SOURCES], ids=[row[0] for row in SPOILED_SOURCES]
)
def test_a_spoiled_source_is_refused_by_name(rule: PlanRule, spoil: Callable[[Manifests], Manifests]) -> None:
    """One thing is wrong with the source, and the refusal names the rule that it breaks."""
    error = refused(spoil(source()), destination())
    assert error.rule is rule
    assert error.code is ErrorCode.INCOMPATIBLE_WORKERS
    assert rule in error.message
    assert str(error.expected) in error.message


def test_another_block_size_is_refused() -> None:
    """A receiver with other blocks cannot hold the source's."""
    other = replace(make_shape(layers="lf", kv=2, hk=2, hv=2), block_size=4)
    error = refused(source(), Worker(other, 1, name="decode-0").manifests())
    assert (error.rule, error.expected, error.actual) == (PlanRule.BLOCK_SIZE, 3, 4)


def test_another_dtype_is_refused() -> None:
    """Bytes are moved, never converted."""
    other = Worker(make_shape(layers="lf", kv=2, hk=2, hv=2, dtype=Dtype.FLOAT16), 1, name="decode-0")
    error = refused(source(), other.manifests())
    assert error.rule is PlanRule.DTYPES
    assert error.actual == CacheDtypes(key=Dtype.FLOAT16, value=Dtype.FLOAT16, conv=Dtype.FLOAT16)


def test_all_that_differs_is_named_at_once() -> None:
    """Who reads the refusal can mend everything in one go: each field with both values, its rule, and what to change."""
    other = make_shape(layers="lf", kv=2, hk=2, hv=2, dtype=Dtype.FLOAT16)
    error = refused(source(), on_all(Worker(other, 1, name="decode-0").manifests(), model="other"))
    assert error.message == str(error)
    dtypes = "key={0} value={0} conv={0} ssm=float32"
    assert error.message.split("; ") == [
        "model: tiny at the prefill worker, other at the decode worker (rule same_model: start both from the same checkpoint)",
        f"dtypes: {dtypes.format('float32')} at the prefill worker, {dtypes.format('float16')} at the decode worker (rule same_dtypes: set dtype alike)",
    ]


def test_another_number_of_guesses_is_no_reason_to_refuse() -> None:
    """How many tokens a worker guesses is its own affair."""
    assert plan(source(), on_all(destination(), num_speculative_tokens=2)).parts == plan(source(), destination()).parts


@pytest.mark.parametrize(
    ("tensor", "changes"),
    [
        ("draft/bootstrap/0/whole", {"hidden_size": 6}),
        ("draft/key/0/whole", {"head_dim": 4}),
        ("draft/key/0/whole", {"num_kv_heads": 4}),
    ],
    ids=["hidden size", "head size", "heads"],
)
def test_the_same_draft_of_another_shape_is_refused(tensor: str, changes: dict[str, int]) -> None:
    """Who claims the same draft head must keep the same caches of it: the refusal names the cache."""
    shape = make_shape(layers="lf", kv=2, hk=2, hv=2, draft=1)
    honest = Worker(shape, 1, name="decode-0").manifests()[0]
    lying = Worker(replace(shape, **changes), 1, name="decode-0").manifests()[0]
    spans = [span for span in honest.spans if span.key.namespace is Namespace.TARGET]
    spans += [moved_by(span, honest.region_bytes) for span in lying.spans if span.key.namespace is Namespace.DRAFT]
    claimed = replace(honest, spans=tuple(spans), region_bytes=honest.region_bytes + lying.region_bytes)
    error = refused(Worker(shape, 2).manifests(), [claimed])
    assert error.rule in {PlanRule.UNIT, PlanRule.GAP}
    assert tensor in error.where


def moved_by(span: Span, nbytes: int) -> Span:
    """The span, so many bytes further down."""
    return replace(span, place=replace(span.place, offset=span.place.offset + nbytes))


def test_a_receiver_with_more_heads_is_refused() -> None:
    """A head that no source rank holds is a gap of the source."""
    other = Worker(make_shape(layers="lf", kv=4, hk=2, hv=2), 1, name="decode-0")
    error = refused(source(), other.manifests())
    assert (error.rule, error.expected, error.actual) == (PlanRule.GAP, 4, 2)
    assert error.where.startswith("source")


@pytest.mark.parametrize(("num_heads", "tp", "dcp"), [(2, 2, 2), (2, 4, 4), (4, 8, 8), (2, 6, 2)])
def test_more_context_parallelism_than_replicas_is_refused(num_heads: int, tp: int, dcp: int) -> None:
    """Ranks that share blocks must hold the same heads, so a group is no larger than a head's replicas, and divides them."""
    shape = make_shape(layers="f", kv=num_heads)
    grouped = [
        replace(manifest, coordinates=Coordinates(tp_rank=i, tp_size=tp, dcp_rank=i % dcp, dcp_size=dcp))
        for i, manifest in enumerate(Worker(shape, tp, name="decode-0").manifests())
    ]
    error = refused(Worker(shape, 1).manifests(), grouped)
    assert (error.rule, error.code) == (PlanRule.CONTEXT_GROUP, ErrorCode.INCOMPATIBLE_WORKERS)
    assert error.where.startswith("destination")
    assert f"set dcp of the decode worker, which is {dcp}, to a divisor of {max(1, tp // num_heads)}" in error.message


def test_a_role_in_the_wrong_kind_of_place_is_refused() -> None:
    """KEY and VALUE are paged, CONV and SSM have slots."""
    paged = next(span.place for span in source()[0].spans if isinstance(span.place, PagedPlace))
    slotted = next(span.place for span in source()[0].spans if isinstance(span.place, SlotPlace))
    for role, wrong in ((Role.SSM, paged), (Role.KEY, slotted)):
        manifests = source()
        spans = tuple(replace(s, place=wrong) if s.key.role is role else s for s in manifests[0].spans)
        assert refused([replace(manifests[0], spans=spans), manifests[1]], destination()).rule is PlanRule.UNIT
