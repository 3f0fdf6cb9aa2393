"""What identifies a checkpoint: equal fingerprints mean that one worker's cache can be continued by the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from common.engine.model.config import ModelConfig

SAMPLE_BYTES: Final = 64 * 1024
NUM_SAMPLES: Final = 64


def checkpoint_fingerprint(folder: Path, config: ModelConfig) -> str:
    """32 hex digits over the configuration and the safetensors files of `folder`. Dtypes of the caches are compared apart.

    Of each file: its name, its size, and 64 evenly spaced samples of 64 KiB (the whole of a small file). Reading terabytes at
    every start would cost more than it protects: two trainings of one model differ in every sample.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(config, order="deterministic"))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if size <= SAMPLE_BYTES * NUM_SAMPLES:
                digest.update(file.read())
                continue
            for i in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def draft_fingerprint(checkpoint: str) -> str:
    """What identifies the draft head of the checkpoint with this fingerprint, which covers its weights too."""
    return f"mtp:{checkpoint}"
