"""Whatever holds a text back or breaks it off, guesses change nothing: under the engine's own step runner, draft loop and sampler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from common.engine.model.sampler import Draw
from common.engine.ranks import step_runner
from contracts.requests import SamplingParams
from tests.property.toy_speculation import Tables, ToyEngine

NUM_SEEDS = 200
NUM_TOKENS = 5
DEPTHS = (1, 2, 4)
EOS = (0, 1, 2)


def tables() -> Tables:
    """Long enough for what is guessed behind the last token."""
    return Tables(2, num_positions=12)


def texts_of(engine: ToyEngine) -> dict[int, list[int]]:
    """The texts of all seeds behind token 5, as far as they come."""
    texts = engine.begin(dict.fromkeys(range(NUM_SEEDS), 5))
    while wanted := {
        seed: NUM_TOKENS - len(text)
        for seed, text in texts.items()
        if len(text) < NUM_TOKENS and seed not in engine.failed
    }:
        for seed, run in engine.go_on(wanted).items():
            texts[seed] += run
    return texts


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_the_end_of_a_text_is_held_back_alike(min_tokens: int) -> None:
    """`min_tokens` counts tokens behind the prompt, in the middle of a run of guesses as well."""
    known = tables()
    plain = texts_of(ToyEngine(known, 0, eos=EOS, min_tokens=min_tokens))
    early = [any(token in EOS for token in text[:min_tokens]) for text in plain.values()]
    assert not any(early)
    assert all(any(text[at] in EOS for text in plain.values()) for at in range(min_tokens, NUM_TOKENS))
    for depth in DEPTHS:
        assert texts_of(ToyEngine(known, depth, eos=EOS, min_tokens=min_tokens)) == plain


def test_a_text_that_is_held_back_at_another_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: who verifies counts one token too many."""
    plain = texts_of(ToyEngine(tables(), 0, eos=EOS, min_tokens=3))

    def one_further(position: int, sampling: SamplingParams, num_prompt_tokens: int) -> Draw:
        return Draw.at(position, sampling, num_prompt_tokens - 1)

    monkeypatch.setattr(step_runner, "Draw", SimpleNamespace(at=one_further))
    assert texts_of(ToyEngine(tables(), 2, eos=EOS, min_tokens=3)) != plain


@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_text_breaks_off_at_the_same_token(position: int) -> None:
    """Behind one token of a position the logits are not numbers: what came before them is kept, at every depth, and no more comes."""
    known = tables()
    known.model[position, 3] = torch.nan
    engine = ToyEngine(known, 0)
    plain = texts_of(engine)
    assert {len(plain[seed]) for seed in engine.failed} == {position}
    assert 0 < len(engine.failed) < NUM_SEEDS
    for depth in DEPTHS:
        guessing = ToyEngine(known, depth)
        assert texts_of(guessing) == plain
        assert guessing.failed == engine.failed
