"""Modes side by side: ratios, equal answers, aims, and what makes a run fail."""

from __future__ import annotations

import json

import pytest

from loadtest.client import Sample
from loadtest.comparison import Comparison
from loadtest.figures import mode_ratio, throughput
from loadtest.ideal import Destination
from loadtest.phases import Handoff
from loadtest.report import EXIT_FAILED, EXIT_GOOD, Machine, Report, Table
from loadtest.rounds import orders, random_prompts

_MS = 1_000_000


def _sample(
    mode: str,
    ttft_ms: float,
    *,
    place: int = 0,
    round_number: int = 0,
    tokens: tuple[int, ...] = (4, 5),
    error: str = "",
    sent_ms: float = 0.0,
) -> Sample:
    sent_ns = round(sent_ms * _MS)
    first = sent_ns + round(ttft_ms * _MS)
    return Sample(
        mode=mode,
        round=round_number,
        place=place,
        num_prompt_tokens=1024,
        sent_ns=sent_ns,
        done_ns=first + 10 * _MS,
        token_ids=tokens,
        token_ns=(first, first + 10 * _MS),
        error=error,
    )


def _handoff(gap_ms: float) -> Handoff:
    return Handoff(
        handoff_id="r-0",
        submitted_ns=0,
        num_prompt_tokens=1024,
        finished=True,
        phases={"handoff gap": gap_ms},
        gap_ms=gap_ms,
        after_compute_ms=gap_ms / 2,
        num_bytes=100,
        num_parts=2,
    )


def _report() -> Report:
    return Report("handoff", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))


def _compared(ours: Sample, theirs: Sample, gap_ms: float = 1.0) -> Report:
    comparison = Comparison(["P/D", "mixed"])
    comparison.add_samples("1024 tokens", [ours, theirs])
    comparison.add_handoffs("1024 tokens", "P/D", [_handoff(gap_ms)])
    comparison.add_handoffs("1024 tokens", "mixed", [_handoff(0.0)])
    report = _report()
    comparison.report_times(report)
    comparison.report_phases(report)
    comparison.report_gap(report)
    return report


def test_ratios_are_of_medians_over_all_and_by_round() -> None:
    """The first number is over all rounds, then comes each round alone."""
    samples = [
        _sample("P/D", 20, round_number=0),
        _sample("mixed", 10, round_number=0),
        _sample("P/D", 40, round_number=1),
        _sample("mixed", 10, round_number=1),
    ]
    found = mode_ratio("P/D", "mixed", samples)
    assert found.ttft == (3.0, 2.0, 4.0)
    assert (found.num_equal, found.num_compared) == (2, 2)


def test_throughput_counts_only_time_under_way() -> None:
    """Two requests at once share the time; a pause between rounds is nobody's."""
    both = [_sample("m", 90, sent_ms=0), _sample("m", 90, sent_ms=50), _sample("m", 90, sent_ms=1000)]
    assert throughput(both) == pytest.approx(6 / 0.25)
    assert throughput([]) is None


def test_equal_answers_pass() -> None:
    """Nothing is wrong: status 0, and the aims at 1,024 tokens are met."""
    report = _compared(_sample("P/D", 100), _sample("mixed", 100))
    assert report.status == EXIT_GOOD
    content = json.loads(report.json())
    assert [each["met"] for each in content["aims"]] == [True, True]
    assert content["figures"]["handoff_gap"]["1024 tokens"]["share_p50"] == 0.01


def test_a_gap_above_its_aim_is_said_but_is_no_failure() -> None:
    """Aims tell of the machine as well, so a miss is reported with status 0."""
    report = _compared(_sample("P/D", 100), _sample("mixed", 100), gap_ms=3.0)
    assert report.status == EXIT_GOOD
    assert [each["met"] for each in json.loads(report.json())["aims"]] == [False, True]
    assert "missed" in report.text()


def test_answers_that_differ_fail_the_run() -> None:
    """One other token is enough."""
    report = _compared(_sample("P/D", 100, tokens=(4, 6)), _sample("mixed", 100))
    assert report.status == EXIT_FAILED
    assert "1 of 1 answers of P/D and mixed differ" in report.text()


def test_a_request_that_failed_fails_the_run() -> None:
    """Its own words are in the report, and its answer is not compared."""
    report = _compared(_sample("P/D", 100), _sample("mixed", 100, tokens=(), error="worker lost"))
    assert report.status == EXIT_FAILED
    assert "mixed, round 0, request 0: worker lost" in report.text()


def test_requests_that_the_stream_does_not_tell_of_fail_the_run() -> None:
    """A table of phases of fewer requests than were answered would mislead."""
    comparison = Comparison(["P/D"])
    comparison.add_samples("1024 tokens", [_sample("P/D", 10), _sample("P/D", 10, place=1)])
    comparison.add_handoffs("1024 tokens", "P/D", [_handoff(1.0)])
    report = _report()
    comparison.report_phases(report)
    assert report.status == EXIT_FAILED
    assert "tells of 1 requests; 2 were answered" in report.text()


def test_bytes_above_the_ideal_miss_the_aim() -> None:
    """The aim is exact: every handoff moves the ideal and no byte more."""
    comparison = Comparison(["P/D"])
    comparison.add_samples("1024 tokens", [_sample("P/D", 10)])
    comparison.add_handoffs("1024 tokens", "P/D", [_handoff(1.0)])
    report = _report()
    comparison.report_bytes(report, Destination(ranks=()))
    (aim,) = json.loads(report.json())["aims"]
    assert not aim["met"]


def test_everybody_is_first_in_turn() -> None:
    """Each round begins with another mode, and has all of them."""
    assert list(orders(("a", "b", "c"), 4)) == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_prompts_are_the_same_everywhere_and_differ_from_each_other() -> None:
    """The seed and the length decide; ids stay within the vocabulary."""
    asked = {"count": 5, "num_prompt_tokens": 8, "num_output_tokens": 4, "vocab_size": 100}
    prompts = random_prompts(**asked, seed=1)
    assert prompts == random_prompts(**asked, seed=1)
    assert prompts != random_prompts(**asked, seed=2)
    assert len({prompt.token_ids for prompt in prompts}) == 5
    assert all(0 <= token < 100 for prompt in prompts for token in prompt.token_ids)


def test_a_table_has_equal_columns() -> None:
    """Names stand on the left, numbers on the right."""
    table = Table(title="t", header=("name", "ms"), rows=(("a", "1.00"), ("long name", "12.00")))
    assert table.render() == "t\n  name          ms\n  a           1.00\n  long name  12.00"


def test_a_legend_stands_below_its_table() -> None:
    """One line a column, all of them or none."""
    table = Table(title="t", header=("name", "ms"), rows=(("a", "1.00"),), legend=("whose", "how long"))
    assert table.render() == "t\n  name    ms\n  a     1.00\n  where\n    name  whose\n    ms    how long"
    with pytest.raises(ValueError, match="legend"):
        Table(title="t", header=("name", "ms"), rows=(), legend=("whose",))


def test_a_figure_is_named_once() -> None:
    """A second figure of the same name would hide the first."""
    report = _report()
    report.put("times", 1)
    with pytest.raises(ValueError, match="was not used yet"):
        report.put("times", 2)
