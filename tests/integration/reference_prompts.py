"""Random tiny checkpoints, and greedy continuations by the reference implementation that leave nothing to luck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

NUM_OUTPUT_TOKENS = 64
MIN_MARGIN = 1e-3


@dataclass(frozen=True)
class ReferencePrompt:
    """A prompt, its greedy continuation, and the logits of every position of both but the last.

    `margins` are the distances of the best logit from the second, one for each token of the continuation.
    """

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logits: torch.Tensor
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Reference:
    """A checkpoint folder and what the reference does with it. Every step's margin is at least `MIN_MARGIN`."""

    folder: Path
    prompts: tuple[ReferencePrompt, ...]
    logit_std: float

    @property
    def tolerance(self) -> float:
        """Largest allowed absolute difference of a logit."""
        return 3e-4 * max(1.0, self.logit_std / 4)


def random_model(
    *, tied: bool = False, num_layers: int = 4, num_heads: int = 4, spread: float = 0.12
) -> Qwen3_5ForCausalLM:
    """A model with livelier weights than a fresh one has, and logits with a standard deviation of about 4.

    `spread` is the standard deviation of its matrices. At 0.12 two exact implementations may differ by 7e-4 in fp32, at 0.06 by 1e-4.
    """
    config = Qwen3_5TextConfig(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        tie_word_embeddings=tied,
        eos_token_id=[1, 2],
    )
    generator = torch.Generator().manual_seed(20)
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            deviation = 0.3 if "norm" in name else 0.5 if weight.dim() == 1 else spread
            noise = torch.randn(weight.shape, generator=generator) * deviation
            weight.copy_(noise + (1.0 if "linear_attn.norm" in name else 0.0))
        probe = torch.randint(0, config.vocab_size, (1, 64), generator=generator)
        scale = 4.0 / float(model(probe).logits.std())
        model.lm_head.weight.mul_(scale)
    return model


def wide_model() -> Qwen3_5ForCausalLM:
    """One that eight ranks can be cut from, four of them for each of its two KV heads, with full attention in its middle and at its end."""
    return random_model(num_layers=8, num_heads=8, spread=0.06)


def continue_greedily(model: Qwen3_5ForCausalLM, prompt: torch.Tensor) -> ReferencePrompt | None:
    """The reference's greedy continuation, or None when some step is too close to call."""
    ids = fresh = prompt
    cache = None
    margins: list[float] = []
    for _ in range(NUM_OUTPUT_TOKENS):
        with torch.no_grad():
            output = model(fresh, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        best = output.logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        if margins[-1] < MIN_MARGIN:
            return None
        fresh = best.indices[:1].view(1, 1)
        ids = torch.cat((ids, fresh), 1)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    tokens = ids[0].tolist()
    length = prompt.shape[1]
    return ReferencePrompt(tuple(tokens[:length]), tuple(tokens[length:]), logits, tuple(margins))


def random_reference(folder: Path, lengths: Sequence[int]) -> Reference:
    """Save a random checkpoint in `folder`, with one prompt of each length and its continuation."""
    torch.set_num_threads(1)
    model = random_model(spread=0.06)
    model.save_pretrained(folder)
    prompts = choose_prompts(model, lengths)
    std = float(torch.cat([prompt.logits for prompt in prompts]).std())
    return Reference(folder, prompts, std)


def choose_prompts(model: Qwen3_5ForCausalLM, lengths: Sequence[int]) -> tuple[ReferencePrompt, ...]:
    """One random prompt of each length whose continuation has no step that is too close to call."""
    generator = torch.Generator().manual_seed(7)
    prompts: list[ReferencePrompt] = []
    while len(prompts) < len(lengths):
        prompt = torch.randint(3, model.config.vocab_size, (1, lengths[len(prompts)]), generator=generator)
        kept = continue_greedily(model, prompt)
        if kept is not None:
            prompts.append(kept)
    return tuple(prompts)
