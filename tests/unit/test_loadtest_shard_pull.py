"""What the events of pulls and pushes are summed up to."""

from __future__ import annotations

import pytest

from contracts.errors import PdmeshError
from contracts.events import EventName, HandoffEvent
from loadtest.client import Sample
from loadtest.phases import Handoff
from loadtest.report import Machine, Report
from loadtest.shard_pull import (
    PARALLEL,
    PUSH,
    SERIAL,
    Figures,
    Restore,
    figures_of,
    latency_for,
    num_shards,
    report_shard_pull,
    restores_of,
)

MS = 1_000_000


def _event(name: EventName, at_ms: int, **fields: object) -> HandoffEvent:
    values = {
        "service": "broker",
        "instance": "b",
        "handoff_id": "r1-0",
        "request_id": "r1",
        "at": "",
        "at_ns": at_ms * MS,
    }
    return HandoffEvent(event=name, **(values | fields))  # type: ignore[arg-type]  # as told


def _figures(mode: str, latency_ms: int, restore: float, wait: float | None) -> Figures:
    sample = Sample(
        mode=mode, round=0, place=0, num_prompt_tokens=8, sent_ns=0, done_ns=9 * MS, token_ids=(1,), token_ns=(5 * MS,)
    )
    return figures_of(mode, latency_ms, [sample], [Restore(restore=restore, wait=wait)])


def test_a_restore_runs_from_the_last_layer_to_the_first_step() -> None:
    """The last of the layers that were computed counts, and what the broker says of the pull."""
    handoff = Handoff(handoff_id="r1-0", submitted_ns=0, num_prompt_tokens=8, finished=True, phases={})
    events = [
        _event(EventName.LAYER_COMPUTED, 3),
        _event(EventName.LAYER_COMPUTED, 5),
        _event(EventName.REQUEST_UNLOCKED, 9, parallel=False, wait_ms=2.5, merge_ms=0.5, total_ms=3.5),
        _event(EventName.TAKEN_OVER, 14, started_ns=12 * MS),
    ]
    assert restores_of([handoff], events, parallel=False) == [Restore(restore=7.0, wait=2.5, merge=0.5, pull=3.5)]
    with pytest.raises(PdmeshError, match="another way"):
        restores_of([handoff], events, parallel=True)
    with pytest.raises(PdmeshError, match="another way"):
        restores_of([handoff], events, parallel=None)
    assert restores_of([handoff], [each for each in events if each.parallel is None], parallel=None) == [
        Restore(restore=7.0)
    ]


def test_the_latency_makes_waiting_the_share_that_is_wanted() -> None:
    """Of a restore of 10 ms with a wait of 1 ms and two shards: 3 ms a link give 7 of 16 ms, 44 %."""
    assert latency_for(_figures(SERIAL, 0, 10.0, 1.0), 2) == 3
    assert latency_for(_figures(SERIAL, 0, 1.0, 1.0), 2) == 1
    assert (num_shards("tp=4,num_blocks=9"), num_shards("num_blocks=9")) == (4, 1)
    with pytest.raises(PdmeshError, match="do not tell how long"):
        latency_for(_figures(PUSH, 0, 10.0, None), 2)


def test_the_aim_is_judged_where_links_are_slow() -> None:
    """Without latency there is little to win: only the shaped links count, parallel against serial of the same links."""
    figures = (
        _figures(SERIAL, 0, 10.0, 1.0),
        _figures(PARALLEL, 0, 10.0, 1.0),
        _figures(PUSH, 0, 8.0, None),
        _figures(SERIAL, 3, 16.0, 7.0),
        _figures(PARALLEL, 3, 13.0, 4.0),
        _figures(PUSH, 3, 11.0, None),
    )
    report = Report("shard-pull", {}, Machine.here())
    report_shard_pull(report, {"prefill tp=2, decode tp=1": figures})
    text = report.text()
    assert "42.86% (aim: at least 30%), where serial pull wait is 43.75% of the restore; restore -18.8%" in text
    assert "met" in text
