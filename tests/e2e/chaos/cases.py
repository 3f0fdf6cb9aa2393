"""What is asked under fire, with the tokens that must come: greedy ones from the stored reference, sampled ones from a calm mesh."""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec

from tests.integration.stored_reference import load_reference

_MAX_TOKENS: Final = (1, 2, 7, 16, 33, 64)
_SAMPLED_TOKENS: Final = 48


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request and the whole of its answer."""

    name: str
    prompt: tuple[int, ...]
    parameters: dict[str, Any]
    expected: tuple[int, ...]

    def body(self, model: str) -> dict[str, Any]:
        """The request as JSON."""
        fixed = {"model": model, "prompt": list(self.prompt), "max_tokens": len(self.expected), "stream": True}
        return fixed | {"return_token_ids": True, "ignore_eos": True} | self.parameters


def greedy_cases() -> tuple[Case, ...]:
    """One for each stored prompt, of 1 to 600 tokens, with answers of 1 to 64."""
    return tuple(
        Case(
            name=f"greedy-{number}",
            prompt=prompt.token_ids,
            parameters={"temperature": 0},
            expected=prompt.output_ids[: _MAX_TOKENS[number % len(_MAX_TOKENS)]],
        )
        for number, prompt in enumerate(load_reference("tiny").prompts)
    )


def sampled_questions(num_cases: int, rng: random.Random) -> tuple[Case, ...]:
    """Sampled requests whose answers are not known yet: `expected` holds as many zeros as they will have tokens."""
    prompts = load_reference("tiny").prompts
    return tuple(
        Case(
            name=f"sampled-{number}",
            prompt=rng.choice(prompts).token_ids,
            parameters={"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 30)},
            expected=(0,) * _SAMPLED_TOKENS,
        )
        for number in range(num_cases)
    )
