"""The rows and figures of a timeline, field by field."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName, HandoffEvent
from services.launcher.core.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, WINDOW_S, RestartBudget
from services.launcher.core.timeline import Row, build, by_handoff, tells_all

MS = 1_000_000
BOOT = 10**12
START = datetime(2030, 1, 1, tzinfo=UTC)
TROUBLE = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")


def event(name: EventName, at_ms: float, service: str = "broker", *, boot_ns: int = BOOT, **says: Any) -> HandoffEvent:
    """What a service tells at a moment of the wall; its host's clock began at `boot_ns`."""
    values: dict[str, Any] = {"instance": f"{service}-0"}
    return HandoffEvent(
        event=name,
        service=service,
        handoff_id="r1-0",
        request_id="r1",
        at=(START + timedelta(milliseconds=at_ms)).isoformat(),
        at_ns=boot_ns + round(at_ms * MS),
        **(values | says),
    )


def push(start_ms: float, end_ms: float, **says: Any) -> HandoffEvent:
    """A part from prefill, busy all the time."""
    values: dict[str, Any] = {
        "started_ns": BOOT + round(start_ms * MS),
        "duration_ms": end_ms - start_ms,
        "num_bytes": 1000,
        "role": "key",
        "source_rank": 0,
    }
    return event(EventName.PART_PUSHED, end_ms, "prefill", **(values | says))


def rows_of(*events: HandoffEvent) -> dict[str, Row]:
    """The rows by name, behind a submit at 0."""
    return {row.name: row for row in build([event(EventName.REQUEST_SUBMITTED, 0), *events]).rows}


@pytest.mark.parametrize(
    ("name", "says", "detail"),
    [
        (EventName.REQUEST_SUBMITTED, {"num_tokens": 40}, "40 prompt tokens"),
        (EventName.DECODE_RESERVED, {"prepare_ms": 1.0, "rpc_ms": 2.0}, "prepare 1.0 ms, rpc 2.0 ms"),
        (EventName.DECODE_RESERVED, {"num_tokens": 16, "destination_dp_rank": 2}, "replica 2, 16 cached tokens"),
        (EventName.PREFILL_STARTED, {"prepare_ms": 1.0, "source_dp_rank": 1}, "queue 1.0 ms, replica 1"),
        (
            EventName.PREFILL_FINISHED,
            {"prepare_ms": 1.0, "total_ms": 3.0, "num_tokens": 24},
            "queue 1.0 ms, queue and compute 3.0 ms, 24 computed tokens",
        ),
        (EventName.RANK_PUSHED, {"duration_ms": 4.0, "source_rank": 1}, "busy 4.0 ms, rank 1"),
        (
            EventName.SHARD_PULLED,
            {"source_rank": 1, "destination_rank": 2, "parallel": False, "shard_state": "failed", "error": TROUBLE},
            "rank 1 to 2, one by one, failed, worker_lost: gone",
        ),
        (EventName.SHARDS_MERGED, {"role": "ssm", "merge_ms": 1.0, "wait_ms": 2.0}, "ssm"),
        (
            EventName.REQUEST_UNLOCKED,
            {"wait_ms": 1.0, "merge_ms": 2.0, "total_ms": 3.0, "parallel": True},
            "read 1.0 ms, merge 2.0 ms, pull 3.0 ms, side by side",
        ),
        (
            EventName.TAKEN_OVER,
            {"prepare_ms": 1.0, "enqueue_ms": 2.0, "total_ms": 3.0},
            "prepare 1.0 ms, enqueue 2.0 ms, commit to first decode step 3.0 ms",
        ),
        (
            EventName.REQUEST_FINISHED,
            {"total_ms": 9.0, "num_tokens": 8, "finish_reason": "stop"},
            "since the submit 9.0 ms, 8 output tokens, stop",
        ),
        (EventName.PREEMPTED, {"num_tokens": 8}, "8  tokens"),
    ],
    ids=str,
)
def test_a_row_says_in_words_what_its_event_says(name: EventName, says: dict[str, Any], detail: str) -> None:
    """Each number with its meaning, in a fixed order; nothing for what is absent."""
    (row,) = build([event(name, 90, **says)]).rows
    assert (row.name, row.who, row.detail) == (name.value.replace("_", " "), "broker-0", detail)


def test_a_row_carries_what_its_event_counts() -> None:
    """Bytes and parts; a service without an instance is named by its kind."""
    row = rows_of(event(EventName.LEDGER_CLOSED, 9, instance="", num_bytes=5, num_parts=6, duration_ms=2.0))[
        "ledger closed"
    ]
    assert row == Row(at_ms=7.0, name="ledger closed", who="broker", duration_ms=2.0, num_bytes=5, num_parts=6)


def test_layers_are_one_row() -> None:
    """From the first start to the last end, on all ranks; layers are counted once."""
    layers = [
        event(EventName.LAYER_COMPUTED, 20, "prefill", duration_ms=10.0, layer=0, source_rank=0),
        event(EventName.LAYER_COMPUTED, 21, "prefill", duration_ms=9.0, layer=0, source_rank=1),
        event(EventName.LAYER_COMPUTED, 30, "prefill", duration_ms=5.0, layer=1, source_rank=0, instance=""),
    ]
    row = rows_of(*layers)["compute"]
    assert row == Row(at_ms=10.0, name="compute", who="prefill-0", duration_ms=20.0, detail="2 layers on 2 ranks")
    assert rows_of(layers[2])["compute"].who == "prefill"
    begun = rows_of(event(EventName.PREFILL_STARTED, 4, "prefill"), *layers)["compute"]
    assert (begun.at_ms, begun.duration_ms) == (4.0, 26.0)
    late = rows_of(event(EventName.PREFILL_STARTED, 12, "prefill"), *layers)["compute"]
    assert late.at_ms == 10.0


def test_pushes_of_a_rank_are_one_row() -> None:
    """Their bytes by role, in the order of names; a part that does not count itself is one part; who has no rank has a row too."""
    rows = rows_of(
        push(10, 14),
        push(12, 20, role="conv", num_parts=3, num_bytes=2000),
        push(21, 22, role=None, num_bytes=None, duration_ms=None, started_ns=BOOT + 21 * MS),
        push(5, 6, source_rank=None, instance=""),
    )
    assert rows["push, rank 0"] == Row(
        at_ms=10.0,
        name="push, rank 0",
        who="prefill-0",
        duration_ms=12.0,
        num_bytes=3000,
        num_parts=5,
        detail="busy 13.0 ms of it: cache 0, conv 2,000, key 1,000",
    )
    assert rows["push"] == Row(
        at_ms=5.0,
        name="push",
        who="prefill",
        duration_ms=1.0,
        num_bytes=1000,
        num_parts=1,
        detail="busy 1.0 ms of it: key 1,000",
    )


def test_a_rank_that_pushed_without_single_parts_keeps_its_summary() -> None:
    """Only where parts of the same rank are there the summary is left out; bytes come from the parts then."""
    timeline = build([push(1, 2), event(EventName.RANK_PUSHED, 3, source_rank=1, num_bytes=7, num_parts=2)])
    assert [row.name for row in timeline.rows] == ["push, rank 0", "rank pushed"]
    assert (timeline.num_bytes, timeline.num_parts) == (1000, 1)
    summary = event(EventName.RANK_PUSHED, 3, source_rank=1, num_bytes=7, num_parts=2)
    unlocked = event(EventName.REQUEST_UNLOCKED, 4, num_bytes=10, num_parts=3)
    timeline = build([summary, unlocked])
    assert (timeline.num_bytes, timeline.num_parts) == (17, 5)


def test_hosts_with_other_clocks_are_laid_side_by_side_by_the_wall() -> None:
    """Where clocks differ by more than a second they are not the same clock; where by less, the wall says nothing."""
    submitted = event(EventName.REQUEST_SUBMITTED, 0)
    away = event(EventName.PREFILL_STARTED, 10, "prefill", boot_ns=BOOT + 3_000 * MS)
    (_, row) = build([submitted, away]).rows
    assert row.at_ms == pytest.approx(10.0, abs=0.001)  # the wall's clock is read in floating-point seconds
    near = event(EventName.PREFILL_STARTED, 10, "prefill", boot_ns=BOOT + 900 * MS)
    (_, row) = build([submitted, near]).rows
    assert row.at_ms == pytest.approx(910.0)


def test_of_two_instances_of_a_service_each_has_its_clock() -> None:
    """The first event of each sets the difference to the wall: later ones do not jump with it."""
    first = event(EventName.REQUEST_SUBMITTED, 0)
    other = event(EventName.DECODE_RESERVED, 10, "broker", instance="broker-1", boot_ns=BOOT - 5_000 * MS)
    (_, row) = build([first, other]).rows
    assert row.who == "broker-1"
    assert row.at_ms == pytest.approx(10.0, abs=0.001)


def test_route_trace_and_outcome_come_from_whoever_knows_them() -> None:
    """A question mark for a worker that nobody named; the first trace; the last end, with its reason or its error."""
    submitted = event(EventName.REQUEST_SUBMITTED, 0, prefill_worker="p0")
    reserved = event(EventName.DECODE_RESERVED, 1, trace_id="t1")
    cancelled = event(EventName.REQUEST_CANCELLED, 2, trace_id="t2")
    timeline = build([submitted, reserved, cancelled])
    assert (timeline.route, timeline.trace_id, timeline.outcome) == ("p0 -> ?", "t1", "cancelled")
    assert (timeline.handoff_id, timeline.request_id, timeline.total_ms) == ("r1-0", "r1", 2.0)
    assert (timeline.missing_parts, timeline.num_missing_parts) == ((), 0)
    failed = event(
        EventName.REQUEST_FAILED, 3, error=TROUBLE, decode_worker="d0", missing_parts=("x",), num_missing_parts=2
    )
    timeline = build([reserved, cancelled, failed])
    assert (timeline.route, timeline.outcome) == ("? -> d0", "failed (worker_lost)")
    assert (timeline.missing_parts, timeline.num_missing_parts) == (("x",), 2)


def test_the_overlap_is_what_of_the_push_time_the_compute_hid() -> None:
    """To the end of the last layer, or of the prefill where layers are not told; unknown without either or without time."""
    finished = event(EventName.PREFILL_FINISHED, 12, "prefill")
    assert build([push(0, 10), push(10, 20), finished]).overlap == pytest.approx(12 / 20)
    assert build([push(0, 10), finished]).overlap == 1.0
    layer = event(EventName.LAYER_COMPUTED, 5, "prefill", duration_ms=5.0, layer=0)
    assert build([push(0, 10), layer, finished]).overlap == pytest.approx(0.5)
    assert build([push(0, 10)]).overlap is None
    assert build([push(5, 5), finished]).overlap is None
    again = event(EventName.PREFILL_FINISHED, 16, "broker")
    assert build([push(0, 10), push(10, 20), finished, again]).overlap == pytest.approx(12 / 20)


def test_the_gap_runs_from_the_last_byte_to_the_first_step() -> None:
    """Of a push, a pull or a merge, whichever was last; unknown before either end of it."""
    taken = event(EventName.TAKEN_OVER, 30, started_ns=BOOT + 25 * MS)
    assert build([push(0, 10), taken]).gap_ms == 15.0
    merged = event(EventName.SHARDS_MERGED, 21, "decode")
    assert build([push(0, 10), merged, taken]).gap_ms == 4.0
    pulled = event(EventName.SHARD_PULLED, 22, "decode")
    assert build([pulled, merged, taken]).gap_ms == 3.0
    assert build([taken]).gap_ms is None
    assert build([push(0, 10)]).gap_ms is None
    assert build([push(0, 10), event(EventName.TAKEN_OVER, 30)]).gap_ms == 20.0


def test_a_phase_is_told_by_the_broker_where_both_tell_it() -> None:
    """Whatever comes first."""
    own = event(EventName.PREFILL_FINISHED, 5, "prefill", duration_ms=4.0)
    brokers = event(EventName.PREFILL_FINISHED, 6, "broker", duration_ms=3.0)
    for events in ([own, brokers], [brokers, own]):
        ((_, rank, value),) = build(events).phases
        assert (rank, value) == (None, 3.0)


def test_everything_is_told_once_memory_is_back_and_every_part_has_its_word() -> None:
    """Ends, both releases, and as many parts as the ledger counted; a mixed worker has nothing but its own release."""
    told = [
        event(EventName.REQUEST_FINISHED, 9),
        event(EventName.PREFILL_RELEASED, 10),
        event(EventName.DECODE_RELEASED, 11),
    ]
    closed = event(EventName.LEDGER_CLOSED, 5, num_parts=3)
    unlocked = event(EventName.REQUEST_UNLOCKED, 6, num_parts=1)
    assert tells_all(told)
    assert not any(tells_all(told[:place] + told[place + 1 :]) for place in range(3))
    assert not tells_all([*told, closed, push(1, 2), unlocked])
    assert tells_all([*told, closed, push(1, 2), push(2, 3), unlocked])
    assert tells_all([*told, event(EventName.LEDGER_CLOSED, 5), event(EventName.REQUEST_UNLOCKED, 6)])
    mixed = [event(EventName.REQUEST_FINISHED, 9, mixed_worker="m0")]
    assert not tells_all(mixed)
    assert tells_all([*mixed, event(EventName.DECODE_RELEASED, 9)])


def test_events_are_kept_together_by_handoff() -> None:
    """In the order in which they came."""
    first, second = event(EventName.REQUEST_SUBMITTED, 0), event(EventName.REQUEST_FINISHED, 1)
    assert by_handoff([first, second]) == {"r1-0": [first, second]}


def test_rows_are_in_the_order_of_their_beginnings() -> None:
    """And at the same moment in that of a handoff's life, whatever the order in which they were told."""
    reserved = event(EventName.DECODE_RESERVED, 5, rpc_ms=5.0)
    submitted = event(EventName.REQUEST_SUBMITTED, 0)
    finished = event(EventName.REQUEST_FINISHED, 5)
    names = [row.name for row in build([finished, reserved, submitted]).rows]
    assert names == ["request submitted", "decode reserved", "request finished"]


def test_shards_that_ended_are_not_shown_as_begun() -> None:
    """Unless they were begun under another lock, from or to another rank."""
    shard = {"lock": 1, "source_rank": 0, "destination_rank": 0}
    ended = event(EventName.SHARD_PULLED, 9, "decode", duration_ms=2.0, **shard)
    begun = [
        event(EventName.SHARD_PULL_STARTED, 7, "decode", **(shard | changes))
        for changes in ({}, {"lock": 2}, {"source_rank": 1}, {"destination_rank": 1})
    ]
    names = [row.name for row in build([*begun, ended]).rows]
    assert (names.count("shard pull started"), names.count("shard pulled")) == (3, 1)


def test_a_child_is_started_again_after_growing_pauses_until_its_budget_is_used_up() -> None:
    """Each pause is twice the one before, up to a bound; a minute later there is room again, and the pauses are short."""
    budget = RestartBudget(7)
    pauses = [budget.pause_s(float(second)) for second in range(7)]
    assert pauses == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8, 16)] + [LONGEST_PAUSE_S] * 2
    assert budget.pause_s(WINDOW_S - 0.5) is None
    assert budget.pause_s(WINDOW_S) == LONGEST_PAUSE_S
    assert budget.pause_s(WINDOW_S) is None
    assert budget.pause_s(10 * WINDOW_S) == FIRST_PAUSE_S
    assert RestartBudget(0).pause_s(0.0) is None
