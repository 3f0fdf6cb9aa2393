"""A prompt as it travels to the worker that will compute it."""

import base64
import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from contracts.requests import PromptFrame

MAX_FRAME_B64_BYTES: Final = 128 * 1024
_IDS_PER_FRAME: Final = MAX_FRAME_B64_BYTES // 4 * 3 // 4


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return little-endian u32s. Raises OverflowError for an id that is none."""
    packed = array("I", token_ids)
    if packed.itemsize != 4:
        raise OverflowError(f"unsigned int has {packed.itemsize} bytes here; the rule is: 4")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def prompt_hash(packed: bytes) -> str:
    """Return the SHA-256 of the u32 bytes, in hex: both ends compute it, so that a wrong prompt is never served."""
    return hashlib.sha256(packed).hexdigest()


def prompt_frames(packed: bytes, *, handoff_id: str, digest: str, timeout_ms: int) -> Iterator[PromptFrame]:
    """Cut packed ids (not empty) into frames of at most `MAX_FRAME_B64_BYTES` of base64 each."""
    step = _IDS_PER_FRAME * 4
    num_frames = -(-len(packed) // step)
    for index in range(num_frames):
        yield PromptFrame(
            handoff_id=handoff_id,
            index=index,
            num_frames=num_frames,
            num_prompt_tokens=len(packed) // 4,
            prompt_hash=digest,
            timeout_ms=timeout_ms,
            ids_b64=base64.b64encode(packed[index * step : (index + 1) * step]).decode("ascii"),
        )
