"""Reference outputs kept in files: what the reference implementation says is computed once, and compared ever after."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent / "reference"


class StoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with its greedy continuation, and how far each of its tokens was ahead of the next best logit."""

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    margins: tuple[float, ...]


class StoredReference(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed, and from which weights (sha256 over names and bytes, in the order of the names)."""

    weights_sha256: str
    prompts: tuple[StoredPrompt, ...]


def load_reference(name: str) -> StoredReference:
    """Read one file of `reference/`."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=StoredReference)
