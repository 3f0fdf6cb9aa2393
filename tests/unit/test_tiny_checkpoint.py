"""The shipped checkpoint loads where it says it loads, and has learned what its card says."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest import recall
from models.tiny.evaluate import greedy, load, lose_block, lose_half_recurrent, recall_accuracy

FOLDER = Path(__file__).parents[2] / "models" / "tiny"


@pytest.fixture(scope="module")
def reference() -> AutoModelForCausalLM:
    """Return the checkpoint as the library loads it, in fp32; nothing may be missing or left over."""
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


def test_small_enough_to_ship() -> None:
    """All files of the checkpoint together stay below 12 MB."""
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 12e6


@torch.no_grad()
def test_training_model_and_library_read_the_same_weights(reference: AutoModelForCausalLM) -> None:
    """The stored weights, draft head included, fill the training model, whose greedy tokens are the library's."""
    model = load(FOLDER)
    tokens = torch.tensor([recall.make_task(5, num_pairs=32, num_questions=4).prompt])
    produced = greedy(reference, tokens, 8)
    following = torch.cat([tokens, produced], 1)
    assert torch.equal(model.logits(model.hidden(following))[:, tokens.shape[1] - 1 : -1].argmax(-1), produced)


@torch.no_grad()
def test_recall_works_and_needs_its_cache(reference: AutoModelForCausalLM) -> None:
    """Nine of ten values are right, and at least a tenth of them get lost with one block, or with half of the recurrent heads."""
    healthy = recall_accuracy(reference, 32, 8, num_answers=128)
    assert healthy >= 0.9
    assert recall_accuracy(reference, 32, 8, num_answers=128, damage=lose_block) <= healthy - 0.1
    assert recall_accuracy(reference, 32, 8, num_answers=128, damage=lose_half_recurrent) <= healthy - 0.1


def test_recall_text_becomes_the_same_tokens() -> None:
    """A prompt sent as text is tokenized to the ids of the task, and comes back as that text."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    task = recall.make_task(7, num_pairs=64, num_questions=8)
    assert tuple(tokenizer.encode(task.prompt_text).ids) == task.prompt
    assert tokenizer.decode(list(task.answer)) == recall.to_text(task.answer)


def test_chat_template() -> None:
    """Messages become ChatML turns, and the special tokens in them single ids."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "Continue the text."}, {"role": "user", "content": "And God said,"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nContinue the text.<|im_end|>\n<|im_start|>user\nAnd God said,<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(text).count(2043) == 3
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)
