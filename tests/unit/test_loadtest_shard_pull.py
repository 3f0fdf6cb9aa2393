"""What the events of pulls and pushes are summed up to."""

from __future__ import annotations

import json

import pytest

from contracts.errors import PdmeshError
from contracts.events import EventName, HandoffEvent
from loadtest.client import Sample
from loadtest.phases import Handoff
from loadtest.report import Machine, Report
from loadtest.shard_pull_figures import (
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
        _event(EventName.SHARDS_MERGED, 9, role="conv", wait_ms=2.5, merge_ms=0.1),
        _event(EventName.SHARDS_MERGED, 9, role="ssm", wait_ms=2.5, merge_ms=0.4),
        _event(EventName.TAKEN_OVER, 14, started_ns=12 * MS),
    ]
    assert restores_of([handoff], events, parallel=False) == [
        Restore(restore=7.0, wait=2.5, merges={"conv": 0.1, "ssm": 0.4}, pull=3.5, parallel=False)
    ]
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


def _judged(*figures: Figures) -> tuple[str, bool | None]:
    """What the report says of the aim, and whether it was met."""
    report = Report("shard-pull", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3"))
    report_shard_pull(report, {"prefill tp=2, decode tp=1": figures})
    (aim,) = json.loads(report.json())["aims"]
    assert aim["measured"] in report.text()
    return aim["measured"], aim["met"]


def test_the_aim_is_judged_where_links_are_slow() -> None:
    """Without latency there is little to win: only the shaped links count, parallel against serial of the same links."""
    near = (_figures(SERIAL, 0, 10.0, 4.4), _figures(PARALLEL, 0, 10.0, 4.4), _figures(PUSH, 0, 8.0, None))
    far = (_figures(SERIAL, 3, 16.0, 7.0), _figures(PARALLEL, 3, 13.0, 4.0), _figures(PUSH, 3, 11.0, None))
    assert _judged(*near, *far) == (
        "42.86% at 3 ms (aim: at least 30% where serial pull wait is 39% to 49% of the restore; there it is 43.75%); restore -18.8%",
        True,
    )
    slower = _figures(PARALLEL, 3, 15.0, 6.0)
    assert _judged(*near, far[0], slower, far[2])[1] is False


def test_of_several_latencies_the_one_nearest_to_the_share_is_judged() -> None:
    """Not the first: where waiting is a small part, or nearly all, much or little is won for other reasons."""
    figures: list[Figures] = []
    for latency_ms, wait, beside in ((1, 2.0, 1.9), (3, 4.5, 2.7), (9, 8.0, 7.9)):
        figures += [_figures(SERIAL, latency_ms, 10.0, wait), _figures(PARALLEL, latency_ms, 10.0, beside)]
    shown, met = _judged(*figures)
    assert shown.startswith("40.00% at 3 ms")
    assert met is True


@pytest.mark.parametrize("wait", [3.8, 5.0])
def test_an_aim_whose_condition_does_not_hold_is_not_judged(wait: float) -> None:
    """A serial pull that waits for too little or too much of its restore shows nothing of it, however short the other wait is."""
    report = Report("shard-pull", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3"))
    figures = (_figures(SERIAL, 3, 10.0, wait), _figures(PARALLEL, 3, 8.0, wait / 2))
    report_shard_pull(report, {"prefill tp=2, decode tp=1": figures})
    assert json.loads(report.json())["aims"][0]["met"] is None
    assert "not comparable" in report.text()
    assert report.verdict == "passed; aims: 0 met, 0 missed, 1 not comparable"
    assert report.status == 0


def test_each_role_has_its_own_merge() -> None:
    """A column for each role that was merged; a push has none of them."""
    sample = Sample(
        mode=SERIAL, round=0, place=0, num_prompt_tokens=8, sent_ns=0, done_ns=9 * MS, token_ids=(1,), token_ns=(MS,)
    )
    restores = [Restore(restore=9.0, wait=1.0, merges={"conv": 0.25, "ssm": each}, pull=3.0) for each in (1.5, 2.5)]
    report = Report("shard-pull", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3"))
    figures = (figures_of(SERIAL, 0, [sample], restores), _figures(PUSH, 0, 8.0, None))
    report_shard_pull(report, {"prefill tp=2, decode tp=1": figures})
    lines = report.text().splitlines()
    header = next(line for line in lines if "pull wait p50" in line)
    assert "pull wait p50  merge conv p50  merge ssm p50  pull p50" in header
    assert next(line for line in lines if SERIAL in line).split()[-6:] == ["1.00", "0.25", "2.00", "3.00", "-", "-"]
    assert next(line for line in lines if " push " in line).split()[-6:] == ["-", "-", "-", "-", "-11.1%", "-"]


def test_nothing_that_was_answered_is_told_from_nothing_that_was_told() -> None:
    """The reader is to look at the requests in the one case, at the events in the other."""
    with pytest.raises(PdmeshError, match="no request was answered"):
        figures_of(SERIAL, 0, [], [])
    sample = Sample(
        mode=SERIAL, round=0, place=0, num_prompt_tokens=8, sent_ns=0, done_ns=9 * MS, token_ids=(1,), token_ns=(MS,)
    )
    with pytest.raises(PdmeshError, match="the events tell of no restore"):
        figures_of(SERIAL, 0, [sample], [])
