"""Print the figures of the card: loss on held-out text, agreement of the draft head, recall by list length, and recall with damaged state.

    python -m models.tiny.evaluate models/tiny --novels DIR

Everything is computed in fp32 from the stored weights. Text loss and drafts come from the training model; recall is decoded greedily by
`transformers`, the reference, so that its cache can be damaged between prompt and answer.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from loadtest import recall
from models.tiny.corpus import read_bible, read_novels, split_held_out
from models.tiny.model import ModelConfig, TinyQwen

_ROW = 512
_BLOCK = 16
_DEPTH = 3
_QUESTIONS = 8
_ROWS_AT_ONCE = 16


def load(folder: Path) -> TinyQwen:
    """Return the training model with a checkpoint's weights, in fp32; every weight must be there and none left over."""
    config = json.loads((folder / "config.json").read_text())
    config.update(config["rope_parameters"])
    model = TinyQwen(ModelConfig(**{name: config[name] for name in ModelConfig.__dataclass_fields__}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def held_out_rows(tokenizer: Tokenizer, bible: str, novels: Path) -> Tensor:
    """Return the held-out text as rows of 513 tokens."""
    _, held_out = split_held_out(read_bible(bible) + read_novels(novels))
    stream = [token for encoded in tokenizer.encode_batch(held_out) for token in [*encoded.ids, recall.END_TOKEN]]
    count = (len(stream) - 1) // _ROW
    return torch.tensor([stream[row * _ROW : (row + 1) * _ROW + 1] for row in range(count)])


def text_figures(model: TinyQwen, rows: Tensor) -> tuple[float, float]:
    """Return (nats a token, share of tokens at which the draft head's first guess is the model's own greedy token)."""
    losses, agreements = [], []
    for part in torch.split(rows, _ROWS_AT_ONCE):
        hidden = model.hidden(part[:, :-1])
        logits = model.logits(hidden)
        losses.append(functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none"))
        guesses = model.logits(model.draft(hidden[:, :-1], part[:, 1:-1])).argmax(-1)
        agreements.append((guesses == logits.argmax(-1)[:, 1:]).flatten())
    return torch.cat(losses).mean().item(), torch.cat(agreements).float().mean().item()


def accepted_depths(model: TinyQwen, tokens: Tensor, first: int) -> list[float]:
    """Return the share of places at which the first 1, 2, 3 chained guesses all are the tokens that followed.

    `tokens` `[b, t]` end in the model's own greedy continuation; every place from `first` on with three tokens left is tried.
    """
    hidden = model.hidden(tokens)
    right: list[list[Tensor]] = [[] for _ in range(_DEPTH)]
    for place in range(first, tokens.shape[1] - _DEPTH - 1):
        states, following = hidden[:, : place + 1], tokens[:, 1 : place + 2]
        so_far = torch.ones(tokens.shape[0], dtype=torch.bool)
        for depth in range(_DEPTH):
            drafted = model.draft(states, following)[:, -1:]
            guess = model.logits(drafted).argmax(-1)
            so_far = so_far & (guess[:, 0] == tokens[:, place + 2 + depth])
            right[depth].append(so_far)
            states, following = torch.cat([states, drafted], 1), torch.cat([following, guess], 1)
    return [torch.cat(column).float().mean().item() for column in right]


def lose_block(cache: Any) -> None:
    """Zero one block of 16 tokens, the second, of every full-attention layer."""
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            layer.keys[:, :, _BLOCK : 2 * _BLOCK] = 0
            layer.values[:, :, _BLOCK : 2 * _BLOCK] = 0


def lose_half_recurrent(cache: Any) -> None:
    """Zero the second half of the value heads of every recurrent state: one of two ranks' shards."""
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            heads = layer.recurrent_states[0].shape[1]
            layer.recurrent_states[0][:, heads // 2 :] = 0


def lose_recurrent(cache: Any) -> None:
    """Zero every recurrent state."""
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].zero_()


def lose_convolution(cache: Any) -> None:
    """Zero the inputs that the convolutions remember."""
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.conv_states[0].zero_()


def greedy(reference: Any, prompts: Tensor, num_tokens: int, damage: Callable[[Any], None] | None = None) -> Tensor:
    """Return `[b, num_tokens]`, decoded greedily; `damage` changes the cache after the prompt has been read."""
    out = reference(prompts, use_cache=True)
    cache = out.cache
    if damage is not None:
        damage(cache)
    tokens = [out.logits[:, -1].argmax(-1)]
    for _ in range(num_tokens - 1):
        out = reference(tokens[-1][:, None], cache=cache, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(-1))
    return torch.stack(tokens, 1)


def recall_accuracy(
    reference: Any,
    num_pairs: int,
    num_questions: int,
    *,
    filler: list[int] | None = None,
    damage: Callable[[Any], None] | None = None,
    num_answers: int = 2000,
) -> float:
    """Return the share of right values over at least num_answers questions of held-out tasks."""
    right = asked = 0
    for tasks in _tasks(num_pairs, num_questions, -(-num_answers // num_questions), filler or []):
        produced = greedy(reference, torch.tensor([task.prompt for task in tasks]), 2 * num_questions, damage)
        right += sum(recall.count_right(task, row) for task, row in zip(tasks, produced.tolist(), strict=True))
        asked += num_questions * len(tasks)
    return right / asked


def _tasks(num_pairs: int, num_questions: int, count: int, filler: list[int]) -> Iterator[list[recall.RecallTask]]:
    for start in range(0, count, _ROWS_AT_ONCE):
        seeds = range(start, min(start + _ROWS_AT_ONCE, count))
        yield [
            recall.make_task(seed, num_pairs=num_pairs, num_questions=num_questions, filler=filler) for seed in seeds
        ]


def main() -> None:
    """Print the figures as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--bible", default="bible", help="command that prints the King James Bible (default: %(default)s)"
    )
    parser.add_argument("--novels", type=Path, default=Path("/usr/lib/R/site-library/janeaustenr/data"))
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 16, 32, 48, 64, 96], help="list lengths")
    parser.add_argument("--damaged-pairs", type=int, default=48, help="list length of the damaged runs")
    parser.add_argument("--answers", type=int, default=2000, help="questions a figure (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = load(arguments.checkpoint)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    rows = held_out_rows(tokenizer, arguments.bible, arguments.novels)
    loss, agreement = text_figures(model, rows)
    print(f"| held-out text ({rows.numel()} tokens) | {loss:.3f} nats a token |", flush=True)
    print(f"| draft agrees with the model's greedy token, held-out text | {agreement:.3f} |", flush=True)
    prompts = rows[:: max(1, len(rows) // 32)][:32, :64]
    continued = torch.cat([prompts, greedy(reference, prompts, 64)], 1)
    depths = accepted_depths(model, continued, prompts.shape[1] - 1)
    print(
        f"| drafts accepted to depth 1, 2, 3, greedy text | {', '.join(f'{share:.3f}' for share in depths)} |",
        flush=True,
    )
    for num_pairs in arguments.pairs:
        share = recall_accuracy(reference, num_pairs, _QUESTIONS, num_answers=arguments.answers)
        print(f"| recall, {num_pairs} pairs | {share:.3f} |", flush=True)
    filler = rows[0, :512].tolist() + rows[1, :256].tolist()
    share = recall_accuracy(reference, 48, _QUESTIONS, filler=filler, num_answers=arguments.answers // 4)
    print(f"| recall, 48 pairs after {len(filler)} tokens of text | {share:.3f} |", flush=True)
    for damage in (None, lose_block, lose_half_recurrent, lose_recurrent, lose_convolution):
        share = recall_accuracy(
            reference, arguments.damaged_pairs, _QUESTIONS, damage=damage, num_answers=arguments.answers // 2
        )
        print(
            f"| recall, {arguments.damaged_pairs} pairs, {damage.__name__ if damage else 'undamaged'} | {share:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
