"""What `speculate` makes of what it is told: shares, speeds, aims, ways of drawing, and its flags."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from contracts.errors import InvalidValueError
from contracts.events import EventName, HandoffEvent
from loadtest.arguments import parser
from loadtest.client import Sample
from loadtest.report import EXIT_FAILED, EXIT_GOOD, Machine, Report
from loadtest.settings import PD_MODE
from loadtest.speculate_couplings import by_one_number, by_rejection, by_shared_race, coupling_of
from loadtest.speculate_figures import (
    Case,
    SpeculateFigures,
    add_couplings,
    report_couplings,
    report_speculation,
    speculate_figures,
    speed_of,
)
from loadtest.speculate_meshes import MIXED, MeshFigures, mesh_figures, mesh_spec, report_meshes
from loadtest.speculate_settings import SpeculateSettings
from loadtest.speculate_times import Coupling, PassTimes, RunTimes, Spent
from tests.property.race_cells import agreement


def _report() -> Report:
    return Report("speculate", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))


def _squeezed(report: Report) -> str:
    return "\n".join(" ".join(line.split()) for line in report.text().splitlines())


def _spent(us: int) -> Spent:
    return Spent(wall_ns=2000 * us, cpu_ns=1000 * us)


def _run(us: int, *, num_steps: int, num_tokens: int, text: tuple[int, ...], right: tuple[int, ...] = ()) -> RunTimes:
    return RunTimes(
        spent=_spent(us),
        num_steps=num_steps,
        num_turns=num_steps,
        num_tokens=num_tokens,
        num_offered=(num_steps,) * len(right),
        num_right=right,
        texts=(text,),
    )


def _figures(us: int, *, text: tuple[int, ...] = (1, 2, 3)) -> tuple[SpeculateFigures, SpeculateFigures]:
    """Twelve tokens of 100 µs each without guesses, and `us` for all of them in five steps with two guesses each."""
    plain = [_run(1200, num_steps=12, num_tokens=12, text=(1, 2, 3, 4))]
    guessing = [_run(us, num_steps=5, num_tokens=12, text=text, right=(4, 3))]
    passes = [PassTimes(decode=_spent(90), verify=_spent(120), draft=_spent(30))]
    cases = [Case(temperature=0, batch=1, depth=depth) for depth in (0, 2)]
    return (
        speculate_figures(cases[0], plain, [PassTimes(decode=_spent(90))], plain),
        speculate_figures(cases[1], guessing, passes, plain),
    )


@pytest.mark.parametrize(("us", "met"), [(1176, "met"), (1178, "missed")])
def test_speed_is_held_against_what_passes_and_right_guesses_allow(us: int, met: str) -> None:
    """2.4 tokens a step, 90 µs against 120 + 2 * 30: 1.2 times; 85 % of that is 1.02 times."""
    plain, guessing = _figures(us)
    assert guessing.right == (0.8, 0.6)
    assert guessing.tokens_per_turn == pytest.approx(2.4)
    speed = speed_of(plain, guessing)
    assert speed.possible == pytest.approx(1.2)
    assert speed.measured == speed.measured_by_clock == pytest.approx(1200 / us)
    report = _report()
    report_speculation(report, [plain, guessing])
    assert f"speed, temperature 0, batch 1, depth 2 85% of 1.20 times; wanted 85% {met}\n" in _squeezed(report)
    assert "\n0.0 1 2 2.40 0.80 0.60 196 98 90 120 30 1.02 1.02 1.20 1 of 1\n" in _squeezed(report)
    assert report.status == EXIT_GOOD


def test_texts_are_held_against_those_without_guesses() -> None:
    """As far as both go; one other token fails the run."""
    assert [each.num_equal_texts for each in _figures(900)] == [1, 1]
    other = _figures(900, text=(1, 2, 9))
    assert [each.num_equal_texts for each in other] == [1, 0]
    report = _report()
    report_speculation(report, other)
    assert report.status == EXIT_FAILED
    assert "FAILED: temperature 0, batch 1, depth 2: 1 of 1 texts differ from those without guesses" in report.text()


def test_ways_of_drawing_by_hand() -> None:
    """Two distributions over three tokens, and one whose support is another's."""
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert by_rejection(q, p).tolist() == pytest.approx([0.7, 0.0])
    # [0, 0.2) gives token 0 to both, [0.8, 1) token 2; of token 1 there is [0.5, 0.8) and [0.2, 0.5): nothing in common.
    assert by_one_number(q, p).tolist() == pytest.approx([0.4, 0.0])
    race = [sum(agreement(p[0].tolist(), q[0].tolist(), i) for i in range(3)), 0.0]
    assert by_shared_race(q, p).tolist() == pytest.approx(race)


def test_a_race_is_right_as_often_as_theory_says() -> None:
    """Random distributions: by the formula of single tokens, never more than possible, never less than (1 - TV) / (1 + TV)."""
    generator = torch.Generator().manual_seed(2)
    p, q = torch.softmax(2 * torch.randn(2, 20, 30, generator=generator, dtype=torch.float64), -1)
    race, most = by_shared_race(q, p), by_rejection(q, p)
    expected = [
        sum(agreement(one, other, i) for i in range(30)) for one, other in zip(p.tolist(), q.tolist(), strict=True)
    ]
    assert race.tolist() == pytest.approx(expected, rel=1e-12)
    assert bool((race <= most).all())
    assert bool((race >= most / (2 - most)).all())
    assert by_shared_race(p, p).tolist() == pytest.approx([1.0] * 20)


def test_ways_of_drawing_are_told_by_place() -> None:
    """Sums of several texts."""
    one = coupling_of(torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[0.5, 0.5]]).double())
    other = Coupling(count=3, race=1.0, rejection=2.0, one_number=0.5)
    report = _report()
    report_couplings(report, 0.8, add_couplings([one], [other]))
    assert "\n1 4 50.0% 75.0% 37.5% 0.67\n" in _squeezed(report)


def _sample(token_ids: tuple[int, ...], ms: int) -> Sample:
    """An answer whose tokens after the first came `ms` apart."""
    token_ns = tuple(1_000_000 * ms * at for at in range(len(token_ids)))
    return Sample(
        mode="m",
        round=0,
        place=0,
        num_prompt_tokens=3,
        sent_ns=0,
        done_ns=1,
        token_ids=token_ids,
        token_ns=token_ns,
    )


def _end(num_steps: int, accepted_at: tuple[int, ...], num_drafted: int) -> HandoffEvent:
    return HandoffEvent(
        event=EventName.REQUEST_FINISHED,
        service="broker",
        instance="b",
        handoff_id="h",
        request_id="r",
        at="",
        at_ns=1,
        num_steps=num_steps,
        num_drafted=num_drafted,
        num_accepted=sum(accepted_at),
        accepted_at=accepted_at,
    )


def _meshes(*, pair_right: int = 3, answer: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)) -> list[MeshFigures]:
    """Seven tokens 12 ms apart without guesses, 6 ms with two of them a step: three steps behind the first token."""
    plain, text = [_sample((1, 2, 3, 4, 5, 6, 7), 12)], [_sample(answer, 6)]
    found = [
        mesh_figures(MIXED, 0, 1, plain, []),
        mesh_figures(MIXED, 2, 1, text, [_end(4, (2, 1), 6)]),
        mesh_figures(PD_MODE, 0, 1, plain, []),
        mesh_figures(PD_MODE, 2, 1, text, [_end(3, (2, pair_right - 2), 6)]),
    ]
    return [each for each in found if each is not None]


def test_meshes_are_told_with_their_aims() -> None:
    """Two tokens a step of both kinds; 1.2 times is possible with 2.4 of them, so 1.0 with two, and there is twice as much."""
    plain, guessing = _figures(900)
    report = _report()
    report_meshes(report, _meshes(), [speed_of(plain, guessing)])
    text = _squeezed(report)
    for kind in (MIXED, PD_MODE):
        assert f"\n{kind} 1 2 6.00 6.00 2.00 0.67 0.33 50.0% 2.00 1 of 1\n" in text
        assert f"\n{kind} 1 0 12.00 12.00 1.00 - - - 1 of 1\n" in text
        assert f"\nspeed of {kind}, batch 1, depth 2 200% of 1.00 times; wanted 85% met\n" in text
    assert f"\nguesses of {PD_MODE} as of {MIXED}, batch 1, depth 2 3 of 6, and 3 of 6 met\n" in text


def test_other_answers_fail_and_other_guesses_miss_their_aim() -> None:
    """A pair that guesses less does worse than it could; a token that differs is wrong."""
    report = _report()
    report_meshes(report, _meshes(pair_right=2), [])
    assert f"guesses of {PD_MODE} as of {MIXED}, batch 1, depth 2 2 of 6, and 3 of 6 missed\n" in _squeezed(report)
    other = _report()
    report_meshes(other, _meshes(answer=(1, 2, 3, 4, 5, 6, 8)), [])
    assert f"FAILED: {MIXED}, batch 1, depth 2: 1 of 1 answers differ from those without guesses" in other.text()
    assert (report.status, other.status) == (EXIT_GOOD, EXIT_FAILED)


def test_answers_are_held_against_those_of_the_same_request() -> None:
    """One that failed is missing, and makes none of the others a wrong one."""
    one, two = [msgspec.structs.replace(_sample(ids, 6), place=place) for place, ids in enumerate(((1, 2), (3, 4)))]
    whole, rest = mesh_figures(MIXED, 0, 1, [one, two], []), mesh_figures(MIXED, 2, 1, [two], [_end(2, (0, 0), 2)])
    assert whole is not None
    assert rest is not None
    assert rest.answers_as(whole) == whole.answers_as(rest) == (1, 1)


def test_every_column_is_explained() -> None:
    """Below the table: what a share is of, and which times are of what."""
    plain, guessing = _figures(900)
    report = _report()
    report_speculation(report, [plain, guessing])
    report_couplings(report, 0.8, [Coupling(count=3, race=1.0, rejection=2.0, one_number=0.5)])
    report_meshes(report, _meshes(), [])
    text = report.text()
    assert text.count("\n  where\n") == 3
    for column in ("same texts", "race over rejection", "right a step, by place"):
        assert f"\n    {column}  " in text


def test_a_pair_keeps_the_draft_on_both_sides(tmp_path: Path) -> None:
    """Without guesses no worker has a draft."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    settings = _settings("--model", str(tmp_path))
    assert mesh_spec(settings, PD_MODE, 3).workers == (
        ("prefill", "tp=1,num_speculative_tokens=3"),
        ("decode", "tp=1,num_speculative_tokens=3"),
    )
    assert mesh_spec(settings, MIXED, 0).workers == (("mixed", "tp=1"),)


def _settings(*argv: str) -> SpeculateSettings:
    values = vars(parser().parse_args(["speculate", *argv]))
    del values["command"], values["json"]
    return SpeculateSettings(**values)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--depths", "0"], "depths"),
        (["--depths", "9"], "depths"),
        (["--depths", "2,2"], "depths"),
        (["--batches", "9"], "batches"),
        (["--temperatures", "2.5"], "temperatures"),
        (["--temperatures", "1,1"], "temperatures"),
        (["--output-tokens", "8"], "output_tokens"),
        (["--output-tokens", "401"], "output_tokens"),
        (["--passes", "0"], "passes"),
        (["--rounds", "0"], "rounds"),
        (["--requests", "-1"], "requests"),
        (["--requests", "2", "--batches", "1,8"], "requests"),
        (["--request-timeout", "0"], "request_timeout_s"),
        (["--model", "/nowhere"], "model"),
        (["--time-limit", "0"], "time_limit_s"),
    ],
)
def test_bad_values_are_named(argv: list[str], field: str) -> None:
    """Before anything starts."""
    with pytest.raises(InvalidValueError, match=rf"^{field}: "):
        _settings(*argv)


def test_what_is_measured_without_flags() -> None:
    """Depths 1, 2, 3 and 5 beside none, alone and eight at a time, greedy and sampled."""
    settings = _settings()
    assert (settings.depths, settings.batches, settings.temperatures) == ((1, 2, 3, 5), (1, 8), (0.0, 0.8))
