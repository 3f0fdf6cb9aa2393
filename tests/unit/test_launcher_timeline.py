"""A timeline is computed from events alone, whatever their order."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName, HandoffEvent
from contracts.phases import Phase
from services.launcher.core.table import render, render_event
from services.launcher.core.timeline import build, by_handoff, is_finished, tells_all

_MS = 1_000_000
_START = datetime(2025, 1, 1, tzinfo=UTC)


def _event(name: EventName, at_ms: float, service: str, *, boot_ns: int = 10**12, **fields: Any) -> HandoffEvent:
    return HandoffEvent(
        event=name,
        service=service,
        instance=fields.pop("instance", f"{service}-0"),
        handoff_id=fields.pop("handoff_id", "r1-0"),
        request_id="r1",
        at=(_START + timedelta(milliseconds=at_ms)).isoformat(),
        at_ns=boot_ns + round(at_ms * _MS),
        **fields,
    )


def _push(start_ms: float, end_ms: float, rank: int, role: str = "key", busy_ms: float | None = None) -> HandoffEvent:
    return _event(
        EventName.PART_PUSHED,
        end_ms,
        "prefill",
        started_ns=10**12 + round(start_ms * _MS),
        duration_ms=end_ms - start_ms if busy_ms is None else busy_ms,
        num_bytes=1000,
        num_parts=1,
        source_rank=rank,
        destination_rank=0,
        role=role,
        layer=3,
    )


def _layer(start_ms: float, duration_ms: float, layer: int) -> HandoffEvent:
    return _event(
        EventName.LAYER_COMPUTED,
        start_ms + duration_ms,
        "prefill",
        started_ns=10**12 + round(start_ms * _MS),
        duration_ms=duration_ms,
        layer=layer,
        source_rank=0,
    )


def _story() -> list[HandoffEvent]:
    return [
        _event(EventName.REQUEST_SUBMITTED, 0, "broker", prefill_worker="prefill-0", decode_worker="decode-0"),
        _event(EventName.DECODE_RESERVED, 2, "broker", duration_ms=1.5, rpc_ms=1.2),
        _layer(5, 5, 0),
        _layer(10, 10, 3),
        _push(12, 16, 0),
        _push(16, 24, 1, "ssm"),
        _event(EventName.RANK_PUSHED, 25, "prefill", source_rank=0, num_bytes=1000, num_parts=1),
        _event(EventName.PREFILL_FINISHED, 26, "prefill", num_tokens=32),
        _event(EventName.TAKEN_OVER, 29, "broker", started_ns=10**12 + round(27.5 * _MS), total_ms=0.5),
        _event(EventName.REQUEST_FINISHED, 50, "broker", finish_reason="stop"),
    ]


def test_figures_come_from_the_events() -> None:
    """Overlap clips each push at the end of compute; the handoff gap ends at the first decode step."""
    timeline = build(_story())
    assert timeline.overlap == pytest.approx((4 + 4) / 12)
    assert timeline.gap_ms == pytest.approx(3.5)
    assert timeline.total_ms == pytest.approx(50)
    assert (timeline.num_bytes, timeline.num_parts) == (2000, 2)
    assert (timeline.route, timeline.outcome) == ("prefill-0 -> decode-0", "finished (stop)")


def test_of_a_part_in_several_copies_only_the_last_can_be_late() -> None:
    """Half of the second part was copied long before: what lay between its copies is no push time."""
    story = _story()
    whole = next(event for event in story if event.event is EventName.PART_PUSHED and event.role == "ssm")
    last = msgspec.structs.replace(whole, last_started_ns=whole.at_ns - 2 * _MS, duration_ms=4.0)
    timeline = build([last if event is whole else event for event in story])
    assert timeline.overlap == pytest.approx((4 + 2) / 8)


def test_pushes_fold_into_one_row_a_rank() -> None:
    """Parts of a rank are one row with their sum, and the rank's own summary is not shown a second time."""
    rows = {row.name: row for row in build(_story()).rows}
    assert (rows["push, rank 1"].at_ms, rows["push, rank 1"].duration_ms) == (16, 8)
    assert rows["push, rank 1"].detail == "busy 8.0 ms of it: ssm 1,000"
    assert (rows["compute"].at_ms, rows["compute"].detail) == (5, "2 layers on 1 rank")
    assert "rank pushed" not in rows


def test_a_draft_heads_parts_are_told_from_the_models() -> None:
    """In the row of their rank, and in the event of each."""
    drafts = [msgspec.structs.replace(_push(16, 18, 0), namespace="draft", layer=0, num_bytes=10)]
    rows = {row.name: row for row in build([*_story(), *drafts]).rows}
    assert rows["push, rank 0"].detail == "busy 6.0 ms of it: draft key 10, key 1,000"
    assert render_event(drafts[0]).partition("layer=0  namespace=draft  role=key")[1]


def test_what_came_of_guesses_stands_at_the_release() -> None:
    """Steps, and how many of the guesses that they verified were right, by place where there are several; else nothing of it."""
    counts: dict[str, Any] = {"num_steps": 19, "num_drafted": 55, "num_accepted": 28, "accepted_at": (14, 9, 5)}
    (row,) = build([_event(EventName.DECODE_RELEASED, 30, "broker", **counts)]).rows
    assert row.detail == "19 steps, 28 of 55 guesses right (14, 9, 5 by place)"
    counts["accepted_at"] = (28,)
    counts |= {"draft_ms": 12.34, "verify_ms": 40.0}
    (row,) = build([_event(EventName.DECODE_RELEASED, 30, "broker", **counts)]).rows
    assert row.detail == "19 steps, 28 of 55 guesses right, guessing 12.3 ms, verifying 40.0 ms"
    (row,) = build([_event(EventName.DECODE_RELEASED, 30, "broker")]).rows
    assert row.detail == ""


def test_rank_summaries_count_where_parts_are_missing() -> None:
    """Without events of single parts the summaries of the ranks give bytes and parts."""
    events = [event for event in _story() if event.event is not EventName.PART_PUSHED]
    timeline = build(events)
    assert (timeline.num_bytes, timeline.num_parts, timeline.overlap, timeline.gap_ms) == (1000, 1, None, None)
    assert "rank pushed" in {row.name for row in timeline.rows}


def test_order_and_repeats_change_nothing() -> None:
    """The stream may repeat events and interleave services."""
    shuffled = _story() * 2
    random.Random(7).shuffle(shuffled)
    assert build(shuffled) == build(_story())


def test_a_part_in_pieces_counts_its_busy_time() -> None:
    """A part that waits for later chunks between its pieces is busy for less time than it is open."""
    events = [event for event in _story() if event.event is not EventName.PART_PUSHED]
    timeline = build([*events, _push(6, 21, 0, busy_ms=4)])
    assert timeline.overlap == pytest.approx(3 / 4)
    (row,) = (row for row in timeline.rows if row.name == "push, rank 0")
    assert (row.at_ms, row.duration_ms) == (6, 15)


def test_processes_on_two_hosts_are_joined_by_the_wall_clock() -> None:
    """Monotonic clocks of two hosts have nothing in common, so their events are placed by wall time."""
    moved = [
        msgspec.structs.replace(event, at_ns=event.at_ns - 10**11) if event.service == "broker" else event
        for event in _story()
    ]
    assert build(moved).gap_ms == pytest.approx(5, abs=0.01)


def test_an_unfinished_request_says_so() -> None:
    """There is no total without an end."""
    timeline = build(_story()[:-1])
    assert (timeline.outcome, timeline.total_ms) == ("not finished", None)
    assert not is_finished(_story()[:-1])
    assert is_finished(_story())


def test_a_failure_names_its_code() -> None:
    """The error of the last event is the outcome."""
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="decode-0 is gone")
    events = [*_story()[:-1], _event(EventName.REQUEST_FAILED, 60, "broker", error=error)]
    assert build(events).outcome == "failed (worker_lost)"
    assert "worker_lost: decode-0 is gone" in render(build(events))


def test_a_mixed_request_has_one_worker() -> None:
    """Its route is that worker, and nothing is moved."""
    events = [
        _event(EventName.REQUEST_SUBMITTED, 0, "broker", mixed_worker="mixed-0"),
        _event(EventName.REQUEST_FINISHED, 9, "broker", finish_reason="length"),
    ]
    timeline = build(events)
    assert (timeline.route, timeline.num_bytes, timeline.overlap) == ("mixed-0", 0, None)


@pytest.mark.parametrize("handoffs", [(), ("r1-0", "r1-1")])
def test_a_timeline_is_of_one_handoff(handoffs: tuple[str, ...]) -> None:
    """None and several are refused; `by_handoff` tells them apart first."""
    events = [_event(EventName.REQUEST_SUBMITTED, 0, "broker", handoff_id=handoff) for handoff in handoffs]
    with pytest.raises(ValueError, match=f"about {len(handoffs)}"):
        build(events)
    assert tuple(by_handoff(events)) == handoffs


def test_the_table_shows_phases_in_order_and_the_figures() -> None:
    """Phases come in order of time, figures last."""
    text = render(build(_story()))
    phases = [
        "request submitted",
        "decode reserved",
        "compute",
        "push, rank 0",
        "prefill finished",
        "taken over",
    ]
    places = [text.index(phase) for phase in phases]
    assert places == sorted(places)
    assert "2,000 bytes in 2 parts" in text
    assert "67% of the push time" in text
    assert "3.5 ms from the last cache byte" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_an_event_is_one_line_without_absent_fields() -> None:
    """What an event does not say is not shown."""
    line = render_event(_event(EventName.REQUEST_FINISHED, 50, "broker", num_tokens=1234, finish_reason="stop"))
    assert line.endswith("r1-0  request_finished  broker-0  output_tokens=1,234  finish_reason=stop")


def test_an_events_numbers_say_what_they_count() -> None:
    """Milliseconds of what, and which tokens, stands in the name of each number."""
    reserved = _event(EventName.DECODE_RESERVED, 2, "broker", prepare_ms=0.5, rpc_ms=1.25, num_tokens=0)
    assert render_event(reserved).endswith("prepare_ms=0.5  rpc_ms=1.2  cached_tokens=0")
    assert render_event(_push(1, 3, 0, busy_ms=1.5)).partition("busy_ms=1.5")[1]
    assert render_event(_event(EventName.LEDGER_CLOSED, 9, "broker", duration_ms=4.0)).endswith("ledger_ms=4.0")


def test_phases_come_from_the_broker_in_their_order() -> None:
    """Each phase has a line with its duration, a push one a rank; a trace has its line, and so has what never came."""
    error = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message="too late")
    missing = ("target key of layer 3 for destination rank 0 from source rank 1: [0, 40)",)
    end: dict[str, Any] = {"total_ms": 60.0, "error": error, "missing_parts": missing, "num_missing_parts": 3}
    events = [
        _event(EventName.REQUEST_SUBMITTED, 0, "broker", trace_id="a" * 32),
        _event(EventName.DECODE_RESERVED, 2, "broker", prepare_ms=0.5, rpc_ms=1.25),
        _event(EventName.RANK_PUSHED, 9, "broker", source_rank=1, duration_ms=4.0),
        _event(EventName.RANK_PUSHED, 8, "broker", source_rank=0, duration_ms=3.0),
        _event(EventName.REQUEST_FAILED, 60, "broker", **end),
    ]
    timeline = build(events)
    assert timeline.phases == (
        (Phase.RESERVE_PREPARE, None, 0.5),
        (Phase.RESERVE_RPC, None, 1.25),
        (Phase.PUSH, 0, 3.0),
        (Phase.PUSH, 1, 4.0),
        (Phase.TOTAL, None, 60.0),
    )
    lines = render(timeline).splitlines()
    assert f"  trace {'a' * 32}" in lines
    assert "    reserve_prepare         0.50" in lines
    assert "    push (busy), rank 1     4.00" in lines
    assert lines[-3:] == ["  3 parts of the cache had not arrived:", f"    {missing[0]}", "    and 2 more"]


def test_a_timeline_without_measured_phases_shows_none() -> None:
    """Events of an older build have no trace and no phases: nothing is made up."""
    events = [_event(EventName.REQUEST_SUBMITTED, 0, "broker")]
    assert (build(events).phases, build(events).trace_id) == ((), "")
    assert "phases" not in render(build(events))
    assert "trace" not in render(build(events))


_BEGINS: list[tuple[EventName, dict[str, Any], float, float | None]] = [
    (EventName.REQUEST_SUBMITTED, {}, 90, None),
    (EventName.DECODE_RESERVED, {"prepare_ms": 1.0, "rpc_ms": 4.0}, 86, 4),
    (EventName.RESERVE_REFUSED, {}, 90, None),
    (EventName.PREFILL_ACCEPTED, {"rpc_ms": 3.0}, 87, 3),
    (EventName.PREFILL_STARTED, {"prepare_ms": 5.0}, 90, None),
    (EventName.LAYER_COMPUTED, {"duration_ms": 6.0, "layer": 0}, 84, 6),
    (EventName.PART_PUSHED, {"duration_ms": 7.0, "role": "key"}, 83, 7),
    (EventName.RANK_PUSHED, {"duration_ms": 7.0}, 90, None),
    (EventName.PREFILL_FINISHED, {"prepare_ms": 2.0, "duration_ms": 20.0, "total_ms": 22.0}, 70, 20),
    (EventName.REQUEST_LOCKED, {"lock": 1, "lock_holder": "decode-0"}, 90, None),
    (EventName.SHARD_PULL_STARTED, {"source_rank": 0, "destination_rank": 0}, 90, None),
    (EventName.SHARD_PULLED, {"duration_ms": 6.0, "source_rank": 0, "destination_rank": 0}, 84, 6),
    (EventName.SHARDS_MERGED, {"duration_ms": 0.5, "merge_ms": 0.5, "wait_ms": 8.0}, 89.5, 0.5),
    (EventName.REQUEST_UNLOCKED, {"duration_ms": 12.0, "wait_ms": 8.0, "total_ms": 11.0}, 78, 12),
    (EventName.LEDGER_CLOSED, {"duration_ms": 30.0}, 60, 30),
    (EventName.HANDOFF_COMMITTED, {"rpc_ms": 2.5}, 87.5, 2.5),
    (EventName.TAKEN_OVER, {"started_ns": 10**12 + 88 * _MS, "prepare_ms": 1.0, "total_ms": 6.0}, 82, 6),
    (EventName.PREFILL_RELEASED, {"rpc_ms": 8.0, "response_rpc_ms": 9.0}, 82, 8),
    (EventName.DECODE_RELEASED, {}, 90, None),
    (EventName.HANDOFF_ADOPTED, {}, 90, None),
    (EventName.PREEMPTED, {}, 90, None),
    (EventName.REQUEST_FINISHED, {"total_ms": 90.0}, 90, None),
    (EventName.REQUEST_CANCELLED, {"total_ms": 90.0}, 90, None),
    (EventName.REQUEST_FAILED, {"total_ms": 90.0}, 90, None),
]


@pytest.mark.parametrize(("name", "fields", "began_ms", "shown_ms"), _BEGINS, ids=str)
def test_a_row_begins_before_its_end_by_what_it_shows(
    name: EventName, fields: dict[str, Any], began_ms: float, shown_ms: float | None
) -> None:
    """Whatever field the shown time comes from, the row began that much before the event; a moment shows no time."""
    anchor = _event(EventName.RESERVE_REFUSED, 0, "broker", instance="anchor")
    rows = build([anchor, _event(name, 90, "broker", **fields)]).rows
    (row,) = (row for row in rows if row.who != "anchor")
    assert row.at_ms == pytest.approx(began_ms)
    assert row.duration_ms == shown_ms


@pytest.mark.parametrize(("quarantined", "detail"), [(True, "memory in quarantine"), (None, "")])
def test_a_release_into_quarantine_is_told(quarantined: bool | None, detail: str) -> None:
    """Beside the others, which say nothing of it."""
    (row,) = build([_event(EventName.DECODE_RELEASED, 0, "broker", quarantined=quarantined)]).rows
    assert row.detail == detail


def test_every_event_name_has_its_begin_tested() -> None:
    """A new event cannot be forgotten in the table above."""
    assert {row[0] for row in _BEGINS} == set(EventName)


def test_a_pull_shows_its_shards_its_phases_and_the_gap_behind_its_last_merge() -> None:
    """One row a shard from its begin to its end, and one a merged role; bytes and parts are those of the lock's end."""
    shard = {"lock": 1, "source_rank": 0, "destination_rank": 0, "parallel": True}
    events = [
        _event(EventName.REQUEST_SUBMITTED, 0, "broker"),
        _event(EventName.REQUEST_LOCKED, 10, "broker", lock=1, lock_holder="decode-0"),
        _event(EventName.SHARD_PULL_STARTED, 11, "decode", **shard),
        _event(EventName.SHARD_PULLED, 15, "decode", duration_ms=4.0, num_bytes=90, shard_state="done", **shard),
        _event(EventName.SHARD_PULL_STARTED, 11, "decode", **(shard | {"source_rank": 1})),
        _event(EventName.SHARDS_MERGED, 16, "decode", duration_ms=0.5, merge_ms=0.5, role="ssm", lock=1, parallel=True),
        _event(
            EventName.REQUEST_UNLOCKED,
            17,
            "broker",
            duration_ms=7.0,
            wait_ms=4.0,
            merge_ms=0.5,
            total_ms=5.0,
            num_bytes=180,
            num_parts=4,
            lock=1,
        ),
        _event(EventName.LEDGER_CLOSED, 17, "broker", duration_ms=10.0, num_parts=4),
        _event(EventName.TAKEN_OVER, 19, "broker", started_ns=10**12 + 18 * _MS),
        _event(EventName.PREFILL_RELEASED, 20, "broker"),
        _event(EventName.DECODE_RELEASED, 30, "broker"),
        _event(EventName.REQUEST_FINISHED, 30, "broker", total_ms=30.0),
    ]
    timeline = build(events)
    shards = [(row.name, row.at_ms, row.duration_ms, row.detail) for row in timeline.rows if "shard pull" in row.name]
    assert shards == [
        ("shard pull started", 11, None, "rank 1 to 0, side by side"),
        ("shard pulled", 11, 4, "rank 0 to 0, side by side, done"),
    ]
    assert (timeline.num_bytes, timeline.num_parts, timeline.gap_ms) == (180, 4, 2)
    assert timeline.phases[:4] == (
        (Phase.LOCK, None, 7.0),
        (Phase.PULL_WAIT, None, 4.0),
        (Phase.PULL_MERGE, None, 0.5),
        (Phase.PULL_TOTAL, None, 5.0),
    )
    assert tells_all(events)
    assert not tells_all([event for event in events if event.event is not EventName.REQUEST_UNLOCKED])


def test_compute_began_when_prefill_said_so() -> None:
    """The broker hears of a finished prefill later than it was: the row does not move with the report."""
    events = [
        _event(EventName.REQUEST_SUBMITTED, 0, "broker"),
        _event(EventName.PREFILL_STARTED, 10, "prefill"),
        _event(EventName.PREFILL_FINISHED, 90, "broker", duration_ms=20.0),
    ]
    rows = {row.name: row for row in build(events).rows}
    assert (rows["prefill finished"].at_ms, rows["prefill finished"].duration_ms) == (10, 20)


def test_the_words_of_the_table_mean_one_thing_each() -> None:
    """The handoff gap and the takeover have a name each, busy time is told from a span, and the total stands there once."""
    events = [event for event in _story() if event.event not in {EventName.TAKEN_OVER, EventName.REQUEST_FINISHED}]
    taken = _event(EventName.TAKEN_OVER, 29, "broker", started_ns=10**12 + round(27.5 * _MS), total_ms=0.5)
    pushed = _event(EventName.RANK_PUSHED, 25, "broker", source_rank=0, duration_ms=2.0)
    text = render(build([*events, pushed, taken, _event(EventName.REQUEST_FINISHED, 50, "broker", total_ms=50.0)]))
    assert "handoff gap 3.5 ms from the last cache byte to the first decode step" in text
    assert "commit to first decode step 0.5 ms" in text
    assert "takeover_total (commit to first decode step)" in text
    assert "push (busy), rank 0" in text
    totals = [line for line in text.splitlines() if line.split()[0] == "total"]
    assert [line.split() for line in totals] == [["total", "(submit", "to", "end)", "50.00"]]
