"""Prompt frames: put together in any order, checked, bounded."""

import base64
import hashlib
from array import array

import pytest

from common.worker.core.prompts import PromptBuffer
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.requests import PromptFrame


def _frames(ids: list[int], size: int, handoff: str = "r1-0", timeout_ms: int = 1000) -> list[PromptFrame]:
    data = array("I", ids).tobytes()
    pieces = [data[at : at + 4 * size] for at in range(0, len(data), 4 * size)]
    return [
        PromptFrame(
            handoff_id=handoff,
            index=index,
            num_frames=len(pieces),
            num_prompt_tokens=len(ids),
            prompt_hash=hashlib.sha256(data).hexdigest(),
            timeout_ms=timeout_ms,
            ids_b64=base64.b64encode(piece).decode(),
        )
        for index, piece in enumerate(pieces)
    ]


def test_frames_in_any_order_and_repeated_give_the_prompt_once() -> None:
    """Reordered and duplicated frames are ordinary; a prompt is taken once."""
    buffer = PromptBuffer(max_tokens=100, vocab_size=1000)
    ids = list(range(50))
    frames = _frames(ids, 16)
    for frame in [*reversed(frames), *frames]:
        buffer.add(frame, now=0.0)
    assert buffer.take("r1-0", frames[0].prompt_hash) == tuple(ids)
    with pytest.raises(PdmeshError, match="has not arrived"):
        buffer.take("r1-0", frames[0].prompt_hash)


def test_an_incomplete_prompt_is_not_taken() -> None:
    """A missing frame refuses the run and keeps what came."""
    buffer = PromptBuffer(max_tokens=100, vocab_size=1000)
    frames = _frames(list(range(50)), 16)
    for frame in frames[1:]:
        buffer.add(frame, now=0.0)
    with pytest.raises(PdmeshError, match="3 frames"):
        buffer.take("r1-0", frames[0].prompt_hash)
    buffer.add(frames[0], now=0.0)
    assert len(buffer.take("r1-0", frames[0].prompt_hash)) == 50


def test_another_prompt_under_the_same_hash_is_refused() -> None:
    """A changed byte shows."""
    buffer = PromptBuffer(max_tokens=100, vocab_size=1000)
    good, bad = _frames([1, 2, 3], 16)[0], _frames([1, 2, 4], 16)[0]
    forged = PromptFrame(
        handoff_id="r1-0",
        index=0,
        num_frames=1,
        num_prompt_tokens=3,
        prompt_hash=good.prompt_hash,
        timeout_ms=1000,
        ids_b64=bad.ids_b64,
    )
    buffer.add(forged, now=0.0)
    with pytest.raises(PdmeshError, match="not the one announced"):
        buffer.take("r1-0", good.prompt_hash)
    assert len(buffer) == 0


def test_room_is_bounded_and_comes_back() -> None:
    """Over the bound a prompt is refused as overload; dropped and expired prompts make room."""
    buffer = PromptBuffer(max_tokens=10, vocab_size=1000)
    buffer.add(_frames([1] * 8, 16, "a-0", timeout_ms=1000)[0], now=0.0)
    with pytest.raises(PdmeshError) as caught:
        buffer.add(_frames([1] * 8, 16, "b-0")[0], now=0.0)
    assert caught.value.code is ErrorCode.OVERLOADED
    buffer.expire(now=0.5)
    assert len(buffer) == 1
    buffer.expire(now=1.0)
    assert len(buffer) == 0
    buffer.add(_frames([1] * 8, 16, "b-0")[0], now=1.0)
    buffer.drop("b-0")
    buffer.drop("b-0")
    buffer.add(_frames([1] * 10, 16, "c-0")[0], now=1.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"index": 7}, "index"), ({"ids_b64": "!!"}, "ids_b64"), ({"num_prompt_tokens": 0}, "num_prompt_tokens")],
)
def test_bad_frames_name_their_field(change: dict[str, object], field: str) -> None:
    """A frame that breaks a rule is refused by the name of the field."""
    buffer = PromptBuffer(max_tokens=10, vocab_size=1000)
    frame = _frames([1], 16)[0]
    values = {name: getattr(frame, name) for name in frame.__struct_fields__} | change
    with pytest.raises(InvalidValueError, match=field):
        buffer.add(PromptFrame(**values), now=0.0)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    """The worker does not trust the router's check."""
    buffer = PromptBuffer(max_tokens=10, vocab_size=1000)
    frame = _frames([1, 1000], 16)[0]
    buffer.add(frame, now=0.0)
    with pytest.raises(InvalidValueError, match="below 1000"):
        buffer.take("r1-0", frame.prompt_hash)
