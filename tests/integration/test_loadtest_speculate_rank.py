"""The rank that `speculate` measures: its answers do not depend on guesses, and what it tells adds up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.speculate_rank import SpeculatingRanks

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
PROMPTS = ((40, 50, 60), (70, 80, 90, 100))
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def ranks() -> Iterator[SpeculatingRanks]:
    """With two guesses, and without."""
    found = SpeculatingRanks(str(FOLDER), (0, 2), 2, 32)
    yield found
    found.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_runs_tell_what_steps_gave(ranks: SpeculatingRanks, temperature: float) -> None:
    """Twice in succession, in the same memory."""
    for _ in range(2):
        plain = ranks.run(0, PROMPTS, NUM_TOKENS, temperature)
        guessing = ranks.run(2, PROMPTS, NUM_TOKENS, temperature)
        assert (plain.num_steps, plain.num_tokens, plain.num_offered) == (11, 22, ())
        assert guessing.num_turns == 2 * guessing.num_steps < 22
        assert guessing.num_tokens == guessing.num_turns + sum(guessing.num_right)
        assert guessing.num_offered == (guessing.num_turns,) * 2
        for one, other in zip(plain.texts, guessing.texts, strict=True):
            assert one[: len(other)] == other[: len(one)]


def test_passes_and_couplings_are_told(ranks: SpeculatingRanks) -> None:
    """Without guesses there is no pass that verifies; shares of right guesses are in their order."""
    assert [each.verify for each in ranks.passes(0, 2, 8, 0.8, 3)] == [None] * 3
    for each in ranks.passes(2, 2, 8, 0.8, 3):
        assert each.verify is not None
        assert min(each.verify.cpu_ns, each.decode.cpu_ns) > 0
    text = ranks.run(0, PROMPTS, NUM_TOKENS, 0.8).texts[0]
    assert ranks.couplings(0, PROMPTS[0] + text, len(PROMPTS[0]), 0.8) == ()
    found = ranks.couplings(2, PROMPTS[0] + text, len(PROMPTS[0]), 0.8)
    ranks.couplings(2, PROMPTS[1], 1, 0.8)  # another text leaves nothing behind
    assert ranks.couplings(2, PROMPTS[0] + text, len(PROMPTS[0]), 0.8) == found
    assert len(found) == 2
    for coupling in found:
        assert coupling.count == NUM_TOKENS - 1
        assert 0 < coupling.one_number <= coupling.rejection
        assert coupling.rejection / 2 < coupling.race < coupling.rejection < coupling.count
