"""Phases, bytes and gaps of handoffs, from made-up events; and the least that a handoff can move."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.layout.bind import bind_tokens
from common.layout.planner import plan
from common.layout.region import lay_out
from common.layout.shape import CacheShape, LayerType
from common.layout.slot_rows import bind_slot
from common.layout.templates import PagedTemplate
from contracts.events import EventName, HandoffEvent
from contracts.links import LinkRecord, LinkState
from contracts.manifest import CacheDtypes, Coordinates, Dtype, Namespace
from contracts.requests import WorkerRef
from loadtest.client import Sample
from loadtest.events import brings_drafts
from loadtest.ideal import Destination
from loadtest.phases import phase_order, read_handoffs, with_admission, within
from loadtest.push_shapes import large_shape

_MS = 1_000_000
_SMALL_SHAPE = CacheShape(
    layer_types=(LayerType.LINEAR, LayerType.FULL),
    num_kv_heads=2,
    head_dim=8,
    num_key_heads=8,
    num_value_heads=8,
    key_head_dim=8,
    value_head_dim=4,
    conv_kernel=4,
    dtypes=CacheDtypes(key=Dtype.BFLOAT16, value=Dtype.BFLOAT16, conv=Dtype.FLOAT32),
    block_size=16,
    num_blocks=8,
    num_slots=2,
)


def _event(
    name: EventName, at_ms: float, service: str = "broker", *, handoff: str = "r1-0", **fields: Any
) -> HandoffEvent:
    return HandoffEvent(
        event=name,
        service=service,
        instance=f"{service}-0",
        handoff_id=handoff,
        request_id=handoff.rpartition("-")[0],
        at="2025-01-01T00:00:00+00:00",
        at_ns=round(at_ms * _MS),
        **fields,
    )


def _handoff() -> list[HandoffEvent]:
    return [
        _event(EventName.REQUEST_SUBMITTED, 10, num_tokens=64),
        _event(EventName.DECODE_RESERVED, 12, rpc_ms=2.0, prepare_ms=1.0),
        _event(EventName.PREFILL_ACCEPTED, 13, rpc_ms=1.0),
        _event(EventName.PREFILL_STARTED, 14, "prefill", prepare_ms=0.5),
        _event(EventName.LAYER_COMPUTED, 30, "prefill", started_ns=20 * _MS, layer=0, source_rank=0),
        _event(EventName.PART_PUSHED, 25, "prefill", started_ns=24 * _MS, num_bytes=100, source_rank=0),
        _event(EventName.PART_PUSHED, 28, "prefill", started_ns=26 * _MS, num_bytes=50, source_rank=1),
        _event(EventName.RANK_PUSHED, 29, source_rank=0, duration_ms=1.0),
        _event(EventName.RANK_PUSHED, 29, source_rank=1, duration_ms=2.0),
        _event(EventName.LEDGER_CLOSED, 29.5, num_parts=2),
        _event(EventName.PREFILL_FINISHED, 31, duration_ms=16.0),
        _event(EventName.HANDOFF_COMMITTED, 33, rpc_ms=1.5),
        _event(EventName.TAKEN_OVER, 36, started_ns=34 * _MS, prepare_ms=0.1, enqueue_ms=0.2, total_ms=0.3),
        _event(EventName.PREFILL_RELEASED, 37),
        _event(EventName.DECODE_RELEASED, 50),
        _event(EventName.REQUEST_FINISHED, 50),
    ]


def _sample(sent_ms: float, done_ms: float, length: int = 64) -> Sample:
    return Sample(
        mode="P/D",
        round=0,
        place=0,
        num_prompt_tokens=length,
        sent_ns=round(sent_ms * _MS),
        done_ns=round(done_ms * _MS),
        token_ids=(1,),
        token_ns=(round(done_ms * _MS),),
    )


def test_phases_are_read_from_a_handoffs_events() -> None:
    """Every phase has its milliseconds; the handoff gap runs from the last push to the first decode step."""
    (found,) = read_handoffs(_handoff())
    assert found.phases == {
        "reserve: prepare": 1.0,
        "reserve: rpc": 2.0,
        "run: rpc": 1.0,
        "queue": 0.5,
        "compute": 16.0,
        "push, rank 0": 1.0,
        "push, rank 1": 2.0,
        "ledger close": 1.5,
        "finish: told": 1.0,
        "commit: rpc": 1.5,
        "takeover: prepare": 0.1,
        "takeover: enqueue": 0.2,
        "takeover: total": 0.3,
        "handoff gap": 6.0,
        "handoff gap: after compute": 4.0,
    }
    assert (found.gap_ms, found.after_compute_ms, found.num_bytes, found.num_parts) == (6.0, 4.0, 150, 2)
    assert found.finished


def test_a_mixed_request_has_no_gap() -> None:
    """Without pushes there is none, and the compute is what lies between its start and its end."""
    events = [
        _event(EventName.REQUEST_SUBMITTED, 10, num_tokens=64),
        _event(EventName.PREFILL_STARTED, 12, "mixed"),
        _event(EventName.PREFILL_FINISHED, 19, "mixed"),
    ]
    (found,) = read_handoffs(events)
    assert found.phases == {"compute": 7.0}
    assert (found.gap_ms, found.num_bytes, found.finished) == (None, 0, False)


def test_events_without_a_submission_are_nobodys() -> None:
    """A handoff whose beginning the stream no longer has cannot be placed."""
    assert read_handoffs(_handoff()[1:]) == []


def test_only_handoffs_of_the_measured_requests_count() -> None:
    """A warm-up, or a prompt of another length, lies outside of every window."""
    handoffs = read_handoffs(_handoff())
    assert within(handoffs, [_sample(9, 60)]) == handoffs
    assert within(handoffs, [_sample(11, 60)]) == []
    assert within(handoffs, [_sample(9, 60, length=65)]) == []


def test_admission_is_told_only_where_one_request_can_be_meant() -> None:
    """Two overlapping requests leave it open which of them a submission belongs to."""
    handoffs = read_handoffs(_handoff())
    (alone,) = with_admission(handoffs, [_sample(9, 60)])
    assert alone.phases["admission"] == 1.0
    (together,) = with_admission(handoffs, [_sample(9, 60), _sample(8, 60)])
    assert "admission" not in together.phases


def test_phases_stand_in_the_order_in_which_they_end() -> None:
    """Pushes come by rank, before the ledger closes; what was not seen is left out."""
    seen = ["handoff gap", "push, rank 1", "ledger close", "push, rank 0", "compute"]
    assert phase_order(seen) == ["compute", "push, rank 0", "push, rank 1", "ledger close", "handoff gap"]


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 1), (1, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("num_tokens", [1, 16, 77])
def test_the_ideal_is_what_a_plan_moves(source_tp: int, destination_tp: int, num_tokens: int) -> None:
    """Counted from the destination's spans alone, the bytes are those of the planner's own runs."""
    source, destination = (
        [
            lay_out(_SMALL_SHAPE, Coordinates(tp_rank=rank, tp_size=tp)).manifest(
                worker_id=name, incarnation="i", model="m"
            )
            for rank in range(tp)
        ]
        for name, tp in (("prefill", source_tp), ("decode", destination_tp))
    )
    ids = list(range(8))
    moved = 0
    for template in plan(source, destination).templates:
        runs = (
            bind_tokens(template, ids, ids, 0, num_tokens, 16)
            if isinstance(template, PagedTemplate)
            else bind_slot(template, 0, 1)
        )
        moved += sum(run.nbytes for run in runs)
    assert Destination(ranks=tuple(destination)).ideal_bytes(num_tokens) == moved


@pytest.mark.parametrize(("source_tp", "destination_tp", "dcp"), [(2, 1, 1), (1, 4, 2), (2, 8, 4)])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 77])
@pytest.mark.parametrize("source_draft", ["d", ""])
def test_the_ideal_of_a_draft_head_begins_with_the_second_token(
    source_tp: int, destination_tp: int, dcp: int, num_tokens: int, source_draft: str
) -> None:
    """Pairs stand at their second token: with blocks spread over a group, the rank of the first block holds one less.

    Nothing of it is counted where prefill has no such head: decode's stays empty.
    """
    shape = msgspec.structs.replace(_SMALL_SHAPE, num_draft_layers=1, hidden_size=48)
    shapes = {"prefill": shape if source_draft else _SMALL_SHAPE, "decode": shape}
    drafts = {"prefill": source_draft, "decode": "d"}
    source, destination = (
        [
            lay_out(
                shapes[name], Coordinates(tp_rank=rank, tp_size=tp, dcp_rank=rank % width, dcp_size=width)
            ).manifest(worker_id=name, incarnation="i", model="m", draft=drafts[name])
            for rank in range(tp)
        ]
        for name, tp, width in (("prefill", source_tp, 1), ("decode", destination_tp, dcp))
    )
    compiled = plan(source, destination)
    ids = list(range(8))
    moved = dict.fromkeys(range(destination_tp), 0)
    for template in compiled.templates:
        part = template.part
        first = int(part.namespace is Namespace.DRAFT)
        runs = (
            bind_tokens(template, ids, ids, first, num_tokens, 16)
            if isinstance(template, PagedTemplate)
            else bind_slot(template, 0, 1)
        )
        moved[part.dst_rank] += sum(run.nbytes for run in runs)
    for rank, manifest in enumerate(destination):
        assert Destination(ranks=(manifest,), has_drafts=compiled.has_drafts).ideal_bytes(num_tokens) == moved[rank]


def test_drafts_come_along_if_every_link_of_the_worker_has_them() -> None:
    """Links of others, and those that are not made, say nothing."""

    def link(prefill: str, decode: str, *, has_drafts: bool, state: LinkState = LinkState.LINKED) -> LinkRecord:
        first, second = (WorkerRef(worker_id=name, incarnation="i") for name in (prefill, decode))
        return LinkRecord(prefill=first, decode=second, state=state, since="", has_drafts=has_drafts)

    good = link("p", "d", has_drafts=True)
    others = [link("p", "e", has_drafts=False), link("q", "d", has_drafts=False, state=LinkState.REFUSED)]
    assert brings_drafts([good, *others], "d")
    assert not brings_drafts([good, link("r", "d", has_drafts=False)], "d")
    assert not brings_drafts(others, "d")


def test_the_large_shape_has_the_models_bytes() -> None:
    """32 KiB of keys and values a token and 51.5 MB of states, as that model's own dimensions give."""
    manifest = lay_out(large_shape(1, 1), Coordinates()).manifest(worker_id="w", incarnation="i", model="m")
    states = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert Destination(ranks=(manifest,)).ideal_bytes(16) == 16 * 32768 + states


@pytest.mark.parametrize("missing", [EventName.PART_PUSHED, EventName.PREFILL_RELEASED, EventName.REQUEST_FINISHED])
def test_a_handoff_whose_story_is_not_whole_is_not_finished(missing: EventName) -> None:
    """Events come in the background: figures are made of a handoff only once its last part is told."""
    events = _handoff()
    events.remove(next(event for event in events if event.event is missing))
    (found,) = read_handoffs(events)
    assert not found.finished
