"""How much of the push time is hidden, from made-up events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.events import EventName, HandoffEvent
from loadtest.overlap import overlap_figures, report_overlap
from loadtest.phases import Handoff, read_handoffs
from loadtest.report import EXIT_FAILED, Machine, Report

_MS = 1_000_000


def _event(name: EventName, at_ms: float, **fields: Any) -> HandoffEvent:
    return HandoffEvent(
        event=name,
        service="prefill",
        instance="prefill-0",
        handoff_id="r1-0",
        request_id="r1",
        at="2025-01-01T00:00:00+00:00",
        at_ns=round(at_ms * _MS),
        **fields,
    )


def _push(role: str, layer: int, start_ms: float, end_ms: float, **fields: Any) -> HandoffEvent:
    fields = {"duration_ms": end_ms - start_ms, **fields}
    started_ns = round(start_ms * _MS)
    return _event(EventName.PART_PUSHED, end_ms, role=role, layer=layer, started_ns=started_ns, **fields)


def _handoff() -> Handoff:
    """Two chunks, computed until 30 ms; of 10 ms of pushing, 3 are late."""
    (found,) = read_handoffs(
        [
            _event(EventName.REQUEST_SUBMITTED, 0, num_tokens=64),
            _event(EventName.LAYER_COMPUTED, 20, layer=0, started_ns=18 * _MS, source_rank=0),
            _event(EventName.LAYER_COMPUTED, 30, layer=1, started_ns=20 * _MS, source_rank=0),
            _push("conv", 0, 20, 22),
            _push("ssm", 0, 28, 31),
            # The first of its copies lay long before: 3 ms from 10 on; the last one took 2 ms, all of it late.
            _push("key", 1, 10, 34, duration_ms=5.0, last_started_ns=32 * _MS),
            _event(EventName.PREFILL_FINISHED, 31, duration_ms=25.0),
        ]
    )
    return found


def test_what_lies_after_the_end_of_compute_is_not_hidden() -> None:
    """One millisecond of a state, and the last copy of the keys; a pause between copies is no push time."""
    found = overlap_figures([_handoff(), _handoff()])
    assert found is not None
    assert found.num_handoffs == 2
    assert found.hidden == pytest.approx(1 - 3 / 10)
    assert (found.push_ms, found.tokens_late_ms) == pytest.approx((10.0, 2.0))
    assert (found.states_ms, found.states_late_ms) == pytest.approx((5.0, 1.0))
    assert found.compute_ms == 25.0


def test_what_the_last_layer_adds_in_the_last_chunk_is_ready_last() -> None:
    """Two of ten milliseconds: the first copy of the same part was ready a chunk earlier."""
    found = overlap_figures([_handoff()])
    assert found is not None
    assert found.ready_before_last_layer == pytest.approx(1 - 2 / 10)


def test_no_pushes_are_a_failure_and_late_ones_a_missed_aim() -> None:
    """A mesh that told of nothing has not been measured."""
    report = Report("overlap", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))
    assert overlap_figures([]) is None
    report_overlap(report, {"64 tokens": overlap_figures([_handoff()]), "128 tokens": None})
    assert [each["met"] for each in json.loads(report.json())["aims"]] == [False]
    assert report.status == EXIT_FAILED
    assert "128 tokens: the event stream tells of no push" in report.text()
