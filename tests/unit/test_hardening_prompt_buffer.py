"""A prompt buffer holds its bound against frames that lie about themselves."""

import base64
from typing import Any

import msgspec
import pytest

from common.worker.core.prompts import PromptBuffer
from contracts.errors import InvalidValueError
from contracts.requests import PromptFrame

FRAME = PromptFrame(
    handoff_id="r1-0",
    index=0,
    num_frames=2,
    num_prompt_tokens=3,
    prompt_hash="h",
    timeout_ms=1000,
    ids_b64=base64.b64encode(bytes(8)).decode(),
)


def _buffer() -> PromptBuffer:
    return PromptBuffer(max_tokens=100, vocab_size=320)


def test_frames_that_bring_more_than_they_announced_are_refused() -> None:
    """Three tokens are twelve bytes: eight came, eight more are too many, four more are not."""
    buffer = _buffer()
    buffer.add(FRAME, 0.0)
    second = msgspec.structs.replace(FRAME, index=1)
    with pytest.raises(InvalidValueError, match="ids_b64"):
        buffer.add(second, 0.0)
    buffer.add(msgspec.structs.replace(second, ids_b64=base64.b64encode(bytes(4)).decode()), 0.0)
    buffer.add(FRAME, 0.0)


@pytest.mark.parametrize("changes", [{"num_frames": 0}, {"num_frames": 4}, {"num_prompt_tokens": 0}])
def test_a_prompt_has_at_least_one_token_a_frame(changes: dict[str, Any]) -> None:
    """Otherwise the number of frames would have no bound, and nothing is kept of what is refused."""
    buffer = _buffer()
    with pytest.raises(InvalidValueError, match="num_prompt_tokens"):
        buffer.add(msgspec.structs.replace(FRAME, **changes), 0.0)
    assert len(buffer) == 0
