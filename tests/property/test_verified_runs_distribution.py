"""What guessing and verifying give is distributed as the model says: exactly, by going through all cells of random numbers.

The random numbers of a position are cut into the cells in which the model's choice and the draft's guess stay what they are; one
point of each is run through the engine's step runner, draft loop and sampler, and weighed with the cell's measure. That the
sampler draws the boundaries where the cells have them is shown in `test_engine_sampler`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from common.engine.drafts import mtp_drafter
from common.engine.model.sampler import Draw
from common.engine.ranks import step_runner
from contracts.requests import SamplingParams
from tests.property.race_cells import LATE, Cell, agreement, cells
from tests.property.toy_speculation import VOCAB_SIZE, Tables, ToyEngine

DEPTH = 2
NUM_TOKENS = DEPTH + 1
FIRST = (1, 3)
"""Where the texts begin whose next tokens are looked at: position and token."""
NUM_TEXTS = 10_000
NUM_TEXTS_OF_A_FAULT = 3_000
Texts = dict[tuple[int, ...], float]


class Enumeration:
    """All that can come of a model and its draft, with how often it does."""

    def __init__(self, tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tables = tables
        self._known: dict[tuple[int, int, int], Texts] = {}
        self.accepted: defaultdict[int, float] = defaultdict(float)
        self._times: dict[tuple[int, int], tuple[float, ...]] = {}
        monkeypatch.setattr("common.engine.model.sampler.arrival_times", self._arrival_times)

    def texts(self, position: int, token: int, count: int) -> Texts:
        """The next `count` tokens behind `token`, run after run; each begins with as many guesses as are still wanted."""
        if not count:
            return {(): 1.0}
        key = (position, token, count)
        if key not in self._known:
            found: defaultdict[tuple[int, ...], float] = defaultdict(float)
            for run, measure in self._runs(position, token, count):
                if key == (*FIRST, NUM_TOKENS):
                    self.accepted[len(run) - 1] += measure
                for rest, share in self.texts(position + len(run), run[-1], count - len(run)).items():
                    found[run + rest] += measure * share
            self._known[key] = dict(found)
        return self._known[key]

    def _runs(self, position: int, token: int, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """What one run gives in each cell, with the cell's measure."""
        self._times = {}
        measures = {}
        for seed, held in enumerate(self._cells(position, token, count)):
            measures[seed] = 1.0
            self._times[seed, position] = tuple(1.0 if each == token else LATE for each in range(VOCAB_SIZE))
            for at, cell in enumerate(held, start=1):
                measures[seed] *= cell.measure
                self._times[seed, position + at] = cell.times
        engine = ToyEngine(self._tables, DEPTH)
        begun = engine.begin(dict.fromkeys(measures, 0), position - 1)
        assert all(tokens == [token] for tokens in begun.values())
        runs = engine.go_on(dict.fromkeys(measures, count))
        for seed, measure in measures.items():
            yield tuple(runs[seed]), measure

    def _cells(self, position: int, token: int, count: int) -> Iterator[tuple[Cell, ...]]:
        """A cell for each of the next `count` positions, each behind the guess of the cell before; nothing is guessed at the last."""
        chosen = self._tables.chosen(position, token)
        if count == 1:
            for cell in cells(chosen, chosen):
                yield (cell,)
            return
        for cell in cells(chosen, self._tables.guessed(position, token)):
            for rest in self._cells(position + 1, cell.guess, count - 1):
                yield cell, *rest

    def _arrival_times(self, places: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
        """What a cell says; whatever there is no cell for is used by nobody."""
        return torch.tensor([self._times.get(place, (1.0,) * size) for place in places], dtype=torch.float64)


def expected_texts(tables: Tables, position: int, token: int, count: int) -> Texts:
    """The model's own probabilities of the next `count` tokens, multiplied."""
    found = {}
    for text in product(range(VOCAB_SIZE), repeat=count):
        share, before = 1.0, token
        for at, each in enumerate(text):
            share *= tables.chosen(position + at, before)[each]
            before = each
        found[text] = share
    return found


def expected_accepted(tables: Tables, position: int, token: int) -> list[float]:
    """How often the first guess is right, and how often both are."""
    total = [0.0, 0.0]
    for i in range(VOCAB_SIZE):
        first = agreement(tables.chosen(position, token), tables.guessed(position, token), i)
        behind = tables.chosen(position + 1, i), tables.guessed(position + 1, i)
        total[0] += first
        total[1] += first * sum(agreement(*behind, j) for j in range(VOCAB_SIZE))
    return total


def furthest(found: Texts, expected: Texts) -> float:
    """The largest difference of two distributions."""
    return max(abs(found.get(text, 0.0) - share) for text, share in expected.items())


def test_cells_fill_the_space() -> None:
    """Their measures sum to one, and to the probability of each choice and of each guess."""
    tables = Tables(1)
    p, q = tables.chosen(*FIRST), tables.guessed(*FIRST)
    choices: defaultdict[int, float] = defaultdict(float)
    guesses: defaultdict[int, float] = defaultdict(float)
    for cell in cells(p, q):
        choices[cell.choice] += cell.measure
        guesses[cell.guess] += cell.measure
    assert [choices[i] for i in range(VOCAB_SIZE)] == pytest.approx(p, abs=1e-13)
    assert [guesses[i] for i in range(VOCAB_SIZE)] == pytest.approx(q, abs=1e-13)


def test_verified_runs_are_distributed_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed: to 1e-12 the product of the model's probabilities; and guesses are right as often as theory says."""
    tables = Tables(1)
    enumeration = Enumeration(tables, monkeypatch)
    found = enumeration.texts(*FIRST, NUM_TOKENS)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert furthest(found, expected_texts(tables, *FIRST, NUM_TOKENS)) < 1e-12
    once, twice = expected_accepted(tables, *FIRST)
    assert 0.2 < twice < once < 0.9
    accepted = [enumeration.accepted[num] for num in range(NUM_TOKENS)]
    assert accepted == pytest.approx([1 - once, once - twice, twice], abs=1e-12)


def _accept_all(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    return min(len(drafts), len(chosen))


def _accept_the_first(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    return 1 if drafts else 0


@pytest.mark.parametrize("planted", [_accept_all, _accept_the_first])
def test_accepting_without_comparing_is_noticed(
    planted: Callable[[Sequence[int], Sequence[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: tokens chosen behind a guess that was wrong."""
    tables = Tables(1)
    monkeypatch.setattr(step_runner, "num_accepted", planted)
    found = Enumeration(tables, monkeypatch).texts(*FIRST, 2)
    assert not furthest(found, expected_texts(tables, *FIRST, 2)) < 1e-3


def test_choosing_by_the_probabilities_of_the_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the model's choices come from somebody else's weights."""
    tables, wrong = Tables(1), Tables(1)
    wrong.model = wrong.draft
    found = Enumeration(wrong, monkeypatch).texts(*FIRST, 2)
    assert not furthest(found, expected_texts(tables, *FIRST, 2)) < 1e-3


class Drawn:
    """Texts of many seeds behind token 0 at position 0, drawn with the engine's own random numbers."""

    def __init__(self, tables: Tables, count: int = NUM_TEXTS) -> None:
        engine = ToyEngine(tables, DEPTH)
        texts = engine.begin(dict.fromkeys(range(count), 0))
        runs = engine.go_on(dict.fromkeys(texts, NUM_TOKENS))
        self.share_accepted = sum(len(run) > 1 for run in runs.values()) / count
        while runs:
            for seed, run in runs.items():
                texts[seed] += run
            runs = engine.go_on(
                {seed: NUM_TOKENS - len(text) for seed, text in texts.items() if len(text) < NUM_TOKENS}
            )
        self.counts = Counter(tuple(text[:NUM_TOKENS]) for text in texts.values())


def chi_square(counts: Counter[tuple[int, ...]], expected: Texts) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes that are expected less than five times are one."""
    total = counts.total()
    rare = [text for text, share in expected.items() if share * total < 5]
    pairs = [(counts[text], share * total) for text, share in expected.items() if share * total >= 5]
    if rare:
        pairs.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare) * total))
    return sum((seen - due) ** 2 / due for seen, due in pairs), len(pairs) - 1


def critical_value(degrees: int, deviations: float = 4.75) -> float:
    """What chi-square exceeds once in a million times, by the approximation of Wilson and Hilferty."""
    part = 2 / (9 * degrees)
    return degrees * float((1 - part + deviations * part**0.5) ** 3)


def is_distributed(counts: Counter[tuple[int, ...]], expected: Texts) -> bool:
    """Whether there is nothing to be said against it."""
    found, degrees = chi_square(counts, expected)
    return found < critical_value(degrees)


def expected_share_accepted(tables: Tables) -> float:
    """How often the first guess is right behind what is drawn behind token 0."""
    shares = zip(range(VOCAB_SIZE), tables.chosen(0, 0), strict=True)
    return sum(share * expected_accepted(tables, 1, token)[0] for token, share in shares)


def test_drawn_texts_are_distributed_as_the_model_says() -> None:
    """With the sampler's own random numbers: all texts of three tokens, and the token at each position by itself."""
    tables = Tables(1)
    drawn = Drawn(tables)
    expected = expected_texts(tables, 0, 0, NUM_TOKENS)
    assert is_distributed(drawn.counts, expected)
    for at in range(NUM_TOKENS):
        counts: Counter[tuple[int, ...]] = Counter()
        shares: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for text, share in expected.items():
            counts[text[at : at + 1]] += drawn.counts[text]
            shares[text[at : at + 1]] += share
        assert is_distributed(counts, shares)
    assert drawn.share_accepted == pytest.approx(expected_share_accepted(tables), abs=0.015)


def test_draws_show_that_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of above, seen by the statistic alone."""
    monkeypatch.setattr(step_runner, "num_accepted", _accept_all)
    tables = Tables(1)
    counts = Drawn(tables, NUM_TEXTS_OF_A_FAULT).counts
    assert not is_distributed(counts, expected_texts(tables, 0, 0, NUM_TOKENS))


def test_guessing_by_the_numbers_of_another_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what comes out is right all the same, but guesses are right by luck alone."""
    tables = Tables(1)

    def one_further(position: int, sampling: SamplingParams, num_prompt_tokens: int) -> Draw:
        return Draw.at(position + 1, sampling, num_prompt_tokens)

    monkeypatch.setattr(mtp_drafter, "Draw", SimpleNamespace(at=one_further))
    drawn = Drawn(tables, NUM_TEXTS_OF_A_FAULT)
    assert is_distributed(drawn.counts, expected_texts(tables, 0, 0, NUM_TOKENS))
    assert drawn.share_accepted != pytest.approx(expected_share_accepted(tables), abs=0.05)
