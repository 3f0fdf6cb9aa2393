"""Makes the files of `reference/`: `python -m tests.integration.make_reference FILE [CHECKPOINT]`.

Without a checkpoint FILE is `random.json` or `wide.json`, for the random model of that name.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from transformers import AutoModelForCausalLM

from tests.integration.reference_prompts import choose_prompts, random_model, wide_model
from tests.integration.stored_reference import StoredPrompt, StoredReference

PROMPT_LENGTHS: Final = (
    *(1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 97),
    *(127, 128, 129, 160, 200, 255, 256, 257, 300, 333, 384, 400, 450, 513, 577, 600),
)

WIDE_LENGTHS: Final = (
    *(1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 95, 97),
    *(127, 128, 129, 200, 256, 257, 300, 400, 520),
)
"""Around blocks of 16, and what two and four ranks share of them before the first gets its next one."""


def hash_weights(model: torch.nn.Module) -> str:
    """The hash that a file names its weights by."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_reference(model: torch.nn.Module, lengths: Sequence[int]) -> StoredReference:
    """Compute the file's content. Takes minutes."""
    prompts = choose_prompts(model, lengths)
    return StoredReference(
        weights_sha256=hash_weights(model),
        prompts=tuple(
            StoredPrompt(
                token_ids=prompt.token_ids,
                output_ids=prompt.output_ids,
                margins=tuple(round(margin, 5) for margin in prompt.margins),
            )
            for prompt in prompts
        ),
    )


def main() -> None:
    """Make a file."""
    torch.set_num_threads(1)
    target, *checkpoint = sys.argv[1:]
    lengths: Sequence[int] = PROMPT_LENGTHS
    if checkpoint:
        model = AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32).eval()
    elif Path(target).stem == "wide":
        model, lengths = wide_model(), WIDE_LENGTHS
    else:
        model = random_model()
    Path(target).write_bytes(msgspec.json.encode(make_reference(model, lengths)) + b"\n")


if __name__ == "__main__":
    main()
