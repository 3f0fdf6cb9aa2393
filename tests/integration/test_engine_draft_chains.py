"""How many guesses are right in each step, foretold from the whole text: what steps leave in the draft's cache changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.engine.drafts.drafter import Advance
from common.engine.drafts.mtp_drafter import MtpDrafter
from common.engine.model.attention_metadata import SequenceView
from common.engine.model.mtp_head import FIRST_KEY
from common.engine.ranks.step_buffers import StepSequence
from loadtest.speculate_passes import Passes
from loadtest.speculate_rank import SpeculatingRanks

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
PROMPTS = ((500, 600, 700), tuple(range(300, 320)))
NUM_TOKENS = 40
MOST = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[SpeculatingRanks]:
    """One that guesses nothing, and one for each depth."""
    found = SpeculatingRanks(str(FOLDER), (0, 1, 2, MOST), 1, 128)
    yield found
    found.close()


def right_behind(text: tuple[int, ...]) -> dict[int, int]:
    """By the position of the last known token: how many of `MOST` guesses behind it go on as the text does.

    Every pair before is the true one, and of the chain nothing stays: each position computes its own pair anew.
    """
    passes = Passes(str(FOLDER), MOST, 1, 128)
    head, block_ids = passes._head, range(8)
    assert head is not None
    step = StepSequence(slot=0, block_ids=block_ids, start=0, token_ids=text, num_logits=1)
    hidden = passes._model.forward(passes._buffers.fill([step]), keep_hidden=True).hidden
    assert hidden is not None
    found = {}
    for position in range(len(text) - MOST - 1):
        state, token, num_right = hidden[position : position + 1], text[position + 1], 0
        for place in range(MOST):
            at = position + place
            view = SequenceView(block_ids=block_ids, start=at + FIRST_KEY, num_tokens=1)
            metadata = passes._draft_geometry.build([view])
            state = head.forward(state, torch.tensor([token]), torch.tensor([at]), metadata)
            logits = head.logits(state)
            assert logits is not None
            token = int(logits.argmax())
            num_right += num_right == place and token == text[at + 2]
        found[position + 1] = num_right
    return found


def foretold(right: dict[int, int], first: int, depth: int, num_steps: int) -> list[int]:
    """In each step how many of `depth` guesses are right, when each begins where the one before ended."""
    found: list[int] = []
    position = first
    while position in right and len(found) < num_steps:
        found.append(min(depth, right[position]))
        position += found[-1] + 1
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("depth", [1, 2, MOST])
def test_guesses_are_right_where_the_text_says(ranks: SpeculatingRanks, prompt: tuple[int, ...], depth: int) -> None:
    """At every depth: wrong guesses before leave no trace, right ones are where the true pairs would be."""
    text = ranks.run(0, (prompt,), NUM_TOKENS, 0.0).texts[0]
    right = right_behind((*prompt, *text))
    run = ranks.run(depth, (prompt,), NUM_TOKENS - 2 * MOST, 0.0)
    expected = foretold(right, len(prompt), depth, run.num_steps)
    assert len(expected) == run.num_steps
    assert run.num_right == tuple(sum(count > place for count in expected) for place in range(depth))
    assert 0 < sum(run.num_right) < depth * run.num_steps


def test_pairs_with_each_others_states_are_seen(ranks: SpeculatingRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: where a step makes several pairs, each gets the hidden state of the one before."""
    prompt = PROMPTS[1]
    right_of = MtpDrafter._pairs

    def shifted(self: MtpDrafter, hidden: torch.Tensor | None, advance: Advance) -> object:
        found = right_of(self, hidden, advance)
        return None if found is None else replace(found, hidden=found.hidden.roll(1, 0))

    text = ranks.run(0, (prompt,), NUM_TOKENS, 0.0).texts[0]
    right = right_behind((*prompt, *text))
    monkeypatch.setattr(MtpDrafter, "_pairs", shifted)
    run = ranks.run(MOST, (prompt,), NUM_TOKENS - 2 * MOST, 0.0)
    expected = foretold(right, len(prompt), MOST, run.num_steps)
    assert run.num_right != tuple(sum(count > place for count in expected) for place in range(MOST))
