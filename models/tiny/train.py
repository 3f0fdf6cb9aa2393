"""Train the small Qwen3.5 checkpoint of this folder from nothing.

    python -m models.tiny.train --novels DIR --work DIR --export DIR

Needs the Debian packages `bible-kjv-text` and `r-cran-janeaustenr`, and `rdata` from PyPI; no network, no accelerator. One step sees a
batch of text and a batch of recall tasks; the loss is the cross entropy of both, plus 0.3 times that of the draft head. A run is
determined by its arguments, and continues from its last state in --work when started again.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.tiny.batches import IGNORED, Batch, Curriculum, TextSource, recall_batch
from models.tiny.corpus import read_bible, read_novels, split_held_out
from models.tiny.export import export
from models.tiny.model import ModelConfig, TinyQwen
from models.tiny.muon import make_optimizers
from models.tiny.tokenizer import train_tokenizer

DRAFT_WEIGHT = 0.3
_DRAFT_FROM_PAIRS = 16
_SAVE_EVERY = 25
_LOG_EVERY = 10


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bible", default="bible", help="command that prints the King James Bible (default: %(default)s)"
    )
    parser.add_argument(
        "--novels",
        type=Path,
        default=Path("/usr/lib/R/site-library/janeaustenr/data"),
        help="data folder of the R package janeaustenr (default: %(default)s)",
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the tokenizer, the log and resumable states"
    )
    parser.add_argument("--export", type=Path, required=True, help="folder that receives the checkpoint")
    parser.add_argument("--steps", type=int, default=1000, help="steps in all (default: %(default)s)")
    parser.add_argument(
        "--until", type=int, help="stop after this step, to continue with other arguments (default: --steps)"
    )
    parser.add_argument(
        "--decay-from", type=float, default=0.75, help="share of the steps after which the learning rate falls"
    )
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--text-tokens", type=int, default=1024, help="text tokens a step (default: %(default)s)")
    parser.add_argument("--recall-tokens", type=int, default=1024, help="recall tokens a step (default: %(default)s)")
    parser.add_argument(
        "--asked-share",
        type=float,
        default=0.4,
        help="share of recall rows that announce their keys (default: %(default)s)",
    )
    parser.add_argument(
        "--restart-pairs", type=int, help="list length to continue a run from, instead of the one it had reached"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser


def loss_of(model: TinyQwen, batch: Batch, *, with_draft: bool) -> tuple[Tensor, float, float]:
    """Return (loss, with the draft head's share if wanted, plain loss in nats a token, share of right keys and values or NaN without any)."""
    hidden = model.hidden(batch.inputs)
    wanted = batch.targets != IGNORED
    logits = model.logits(hidden[wanted])
    targets = batch.targets[wanted]
    plain = functional.cross_entropy(logits, targets)
    right = (logits.detach().argmax(-1) == targets)[batch.is_recall[wanted]].float().mean()
    loss = plain
    if with_draft:
        drafted = model.draft(hidden[:, :-1], batch.inputs[:, 1:])[wanted[:, 1:]]
        loss = plain + DRAFT_WEIGHT * functional.cross_entropy(
            model.logits(drafted), batch.targets[:, 1:][wanted[:, 1:]]
        )
    return loss, plain.item(), right.item()


def learning_rate_at(step: int, steps: int, decay_from: float) -> float:
    """Return the factor on the learning rate: 50 steps of warm-up, constant, then straight down to a twentieth."""
    done = step / steps
    return min(1.0, (step + 1) / 50) * (1.0 if done < decay_from else 1 - 0.95 * (done - decay_from) / (1 - decay_from))


def _prepare_text(arguments: argparse.Namespace) -> tuple[TextSource, Tokenizer]:
    """Read the text, and train the tokenizer unless --work holds it already; the held-out chapters are left there for evaluation."""
    chapters, held_out = split_held_out(read_bible(arguments.bible) + read_novels(arguments.novels))
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "held-out.json").write_text(json.dumps(held_out))
    path = arguments.work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(chapters).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    return TextSource(chapters, tokenizer), tokenizer


def main() -> None:
    """Train, save and export as the arguments say."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    text, tokenizer = _prepare_text(arguments)
    config = ModelConfig()
    model = TinyQwen(config)
    optimizers = make_optimizers(model, arguments.learning_rate)
    curriculum = Curriculum()
    first, seconds, num_tokens = 0, 0.0, 0
    state_path = arguments.work / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        curriculum = Curriculum(**state["curriculum"])
        first, seconds, num_tokens = state["step"], state["seconds"], state["num_tokens"]
    if arguments.restart_pairs is not None:
        curriculum = Curriculum(num_pairs=arguments.restart_pairs)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters} parameters, {len(text.stream)} text tokens, from step {first}", flush=True)

    def save(step: int) -> None:
        partial = state_path.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "curriculum": vars(curriculum),
                "step": step,
                "seconds": seconds,
                "num_tokens": num_tokens,
            },
            partial,
        )
        partial.replace(state_path)
        export(model, tokenizer, arguments.export)

    last = arguments.until or arguments.steps
    started = time.perf_counter() - seconds
    for step in range(first, last):
        # Each step has its own stream, so that a continued run sees what an unbroken one would.
        rng = random.Random(f"{arguments.seed}/{step}")
        factor = learning_rate_at(step, arguments.steps, arguments.decay_from)
        num_pairs = (
            curriculum.num_pairs
            if rng.random() < 0.6
            else rng.randint(min(4, curriculum.num_pairs), curriculum.num_pairs)
        )
        losses = []
        for batch in (
            text.batch(rng, arguments.text_tokens),
            recall_batch(rng, text, num_pairs, arguments.recall_tokens, asked_share=arguments.asked_share),
        ):
            # The draft head has nothing to copy from short lists, which the model itself is still learning.
            with_draft = not batch.is_recall.any() or num_pairs >= _DRAFT_FROM_PAIRS
            loss, plain, right = loss_of(model, batch, with_draft=with_draft)
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            losses.append(plain)
            num_tokens += batch.inputs.numel()
        if num_pairs == curriculum.num_pairs:
            curriculum.record(right)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - started
        if step % _LOG_EVERY == 0:
            print(
                f"step {step} text {losses[0]:.3f} recall {losses[1]:.3f} right {right:.3f} of {num_pairs} pairs "
                f"(current {curriculum.num_pairs}) tokens {num_tokens} seconds {seconds:.0f}",
                flush=True,
            )
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == last:
            save(step + 1)


if __name__ == "__main__":
    main()
