"""Training batches teach what they claim to teach."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from loadtest import recall
from models.tiny.batches import IGNORED, Curriculum, TextSource, recall_batch
from models.tiny.corpus import split_held_out

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"
CHAPTER = "\n".join(["In the beginning God created the heaven and the earth."] * 120)


@pytest.fixture(scope="module")
def text() -> TextSource:
    """Return a text of one sentence, many times, in the shipped tokenizer."""
    return TextSource([CHAPTER] * 2, Tokenizer.from_file(str(TOKENIZER)))


def test_text_rows_are_shifted_by_one(text: TextSource) -> None:
    """Each target is the token after its input, and every token is learned."""
    batch = text.batch(random.Random(1), 2048)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.numel() == 2048
    assert not (batch.targets == IGNORED).any()


@pytest.mark.parametrize("asked_share", [0.0, 1.0])
def test_every_value_learned_follows_its_key(text: TextSource, asked_share: float) -> None:
    """In each row, a value that is a target is the one that the list gives to the key that is the input; the list itself is not learned."""
    for seed in range(8):
        batch = recall_batch(random.Random(seed), text, 12, 1024, asked_share=asked_share)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            start = inputs.index(recall.LIST_TOKEN) + 1
            listed = dict(zip(inputs[start : start + 24 : 2], inputs[start + 1 : start + 24 : 2], strict=True))
            places = [place for place, target in enumerate(targets) if target >= recall.FIRST_VALUE_TOKEN]
            assert places
            assert [listed[inputs[place]] for place in places] == [targets[place] for place in places]
            assert set(targets[: start + 24]) == {IGNORED}


def test_announced_keys_are_learned_in_the_order_asked(text: TextSource) -> None:
    """Rows that announce their keys teach them in that order, and teach where the answer ends; other rows teach no keys."""
    for asked_share in (0.0, 1.0):
        batch = recall_batch(random.Random(3), text, 12, 1024, asked_share=asked_share)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            keys = [target for target in targets if recall.FIRST_KEY_TOKEN <= target < recall.FIRST_VALUE_TOKEN]
            if recall.ASK_TOKEN not in inputs:
                assert not keys
                continue
            asked_from = inputs.index(recall.ASK_TOKEN) + 1
            assert keys == inputs[asked_from : asked_from + len(keys)]
            last = max(place for place, target in enumerate(targets) if target >= recall.FIRST_VALUE_TOKEN)
            assert targets[last + 1] in {recall.END_TOKEN, text.encode("<|im_end|>")[0]}
        assert (recall.ASK_TOKEN in batch.inputs) == (asked_share == 1.0)


def test_chat_rows_end_a_turn(text: TextSource) -> None:
    """A conversation is made of ChatML turns whose ends can be learned."""
    row = text.chat(random.Random(2), 400)
    assert len(row) == 400
    starts = [text.encode(f"<|im_start|>{role}\n") for role in ("user", "system")]
    assert any(row[: len(start)] == start for start in starts)
    ends = text.encode("<|im_end|>\n")
    assert any(row[place : place + 2] == ends for place in range(398))
    assert recall.END_TOKEN in row


def test_lists_grow_when_mastered() -> None:
    """Four batches above nine tenths make the list half as long again, up to the longest; others leave it."""
    curriculum = Curriculum(num_pairs=4, longest=8)
    for accuracy in (1.0, 1.0, 1.0, 0.2, 1.0, 1.0, 1.0):
        curriculum.record(accuracy)
    assert curriculum.num_pairs == 4
    curriculum.record(1.0)
    assert curriculum.num_pairs == 6
    for _ in range(20):
        curriculum.record(1.0)
    assert curriculum.num_pairs == 8


def test_held_out_chapters_are_not_trained_on() -> None:
    """One chapter in twenty is held out, and none is in both parts or in neither."""
    chapters = [str(number) for number in range(100)]
    kept, held_out = split_held_out(chapters)
    assert len(held_out) == 5
    assert sorted(kept + held_out) == sorted(chapters)
