"""What a prompt buffer says, word for word, of frames and prompts that it does not take, and where its bounds are."""

from __future__ import annotations

import base64
import hashlib
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from common.worker.core.prompts import PromptBuffer
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.requests import PromptFrame


def frame(ids: list[int], **says: Any) -> PromptFrame:
    """A prompt in one frame."""
    data = array("I", ids).tobytes()
    values: dict[str, Any] = {
        "handoff_id": "r1-0",
        "index": 0,
        "num_frames": 1,
        "num_prompt_tokens": len(ids),
        "prompt_hash": hashlib.sha256(data).hexdigest(),
        "timeout_ms": 2500,
        "ids_b64": base64.b64encode(data).decode(),
    }
    return PromptFrame(**(values | says))


def buffer() -> PromptBuffer:
    """Room for ten tokens of a vocabulary of 1000."""
    return PromptBuffer(max_tokens=10, vocab_size=1000)


@pytest.mark.parametrize(
    ("says", "field", "value", "rule"),
    [
        ({"ids_b64": "!" * 40}, "ids_b64", "!" * 16, "base64 ("),
        ({"index": 1}, "index", "1", "0 to num_frames - 1 = 0"),
        ({"index": -1}, "index", "-1", "0 to num_frames - 1 = 0"),
        ({"num_prompt_tokens": 1}, "ids_b64", "8 bytes", "4 bytes for each of num_prompt_tokens"),
        (
            {"num_frames": 3},
            "num_prompt_tokens",
            "2",
            "1 or more, in 1 or more frames and at least one a frame, of which there are 3",
        ),
    ],
)
def test_a_bad_frame_is_refused_by_field_value_and_rule(
    says: dict[str, Any], field: str, value: str, rule: str
) -> None:
    """Only the beginning of what is not base64 is shown."""
    with pytest.raises(InvalidValueError) as caught:
        buffer().add(frame([1, 2], **says), now=0.0)
    text = str(caught.value)
    assert text.startswith(f"{field}: ")
    assert value in text
    assert value + "!" not in text
    assert f"the rule is: {rule}" in text


@pytest.mark.parametrize("says", [{"num_frames": 2}, {"num_prompt_tokens": 3}, {"prompt_hash": "other"}])
def test_frames_that_contradict_each_other_are_refused(says: dict[str, Any]) -> None:
    """All frames of a prompt say the same of it."""
    kept = buffer()
    first = frame([1, 2])
    kept.add(first, now=0.0)
    with pytest.raises(
        InvalidValueError, match=r"frame: .* the rule is: all frames of a prompt say the same of it"
    ) as caught:
        kept.add(replace(first, **says), now=0.0)
    assert all(str(value) in str(caught.value) for value in says.values())


def test_room_is_kept_for_what_was_announced_and_said_when_it_is_full() -> None:
    """A prompt that fills the room exactly is taken."""
    kept = buffer()
    kept.add(frame([1] * 4), now=0.0)
    assert kept.num_tokens == 4
    with pytest.raises(PdmeshError) as caught:
        kept.add(frame([1] * 7, handoff_id="r2-0"), now=0.0)
    assert str(caught.value) == "prompts that wait hold 4 tokens; at most 10 fit"
    assert caught.value.code is ErrorCode.OVERLOADED
    kept.add(frame([1] * 6, handoff_id="r2-0"), now=0.0)
    assert (kept.num_tokens, len(kept)) == (10, 2)
    kept.drop("r2-0")
    assert kept.num_tokens == 4


def test_a_prompt_waits_for_as_long_as_its_first_frame_says() -> None:
    """Its deadline counts from the moment in which that came, in milliseconds."""
    kept = buffer()
    kept.add(frame([1, 2]), now=10.0)
    kept.expire(now=12.49)
    assert len(kept) == 1
    kept.expire(now=12.5)
    assert (len(kept), kept.num_tokens) == (0, 0)


def test_a_prompt_that_is_not_there_is_told_with_how_much_there_is() -> None:
    """Nothing of it, or less than all."""
    kept = buffer()
    with pytest.raises(PdmeshError) as caught:
        kept.take("r1-0", "h")
    assert str(caught.value) == "the prompt of r1-0 has not arrived: 0 frames"
    assert caught.value.code is ErrorCode.PROTOCOL
    kept.add(frame([1, 2], num_frames=2), now=0.0)
    with pytest.raises(PdmeshError, match=r"^the prompt of r1-0 has not arrived: 1 frames$"):
        kept.take("r1-0", "h")
    assert len(kept) == 1


def test_a_prompt_is_held_against_both_hashes_and_its_length() -> None:
    """The frames' own hash, the command's, and the number of tokens: each alone refuses it, and it is gone then."""
    good = frame([1, 2])
    digest = good.prompt_hash
    for sent, asked in (
        (good, "other"),
        (replace(good, prompt_hash="other"), digest),
        (replace(good, num_prompt_tokens=3), digest),
    ):
        kept = buffer()
        kept.add(sent, now=0.0)
        with pytest.raises(PdmeshError) as caught:
            kept.take("r1-0", asked)
        assert str(caught.value) == f"the prompt of r1-0 is not the one announced: 8 bytes, sha256 {digest}"
        assert caught.value.code is ErrorCode.PROTOCOL
        assert (len(kept), kept.num_tokens) == (0, 0)
    kept = buffer()
    kept.add(good, now=0.0)
    assert kept.take("r1-0", digest) == (1, 2)


def test_the_largest_id_of_the_vocabulary_is_the_last_one_allowed() -> None:
    """999 of 1000 is fine; 1000 is named."""
    kept = buffer()
    last = frame([3, 999, 4])
    kept.add(last, now=0.0)
    assert kept.take("r1-0", last.prompt_hash) == (3, 999, 4)
    over = frame([3, 1000, 4])
    kept.add(over, now=0.0)
    with pytest.raises(InvalidValueError, match=r"^prompt: 1000 is not allowed; the rule is: token ids below 1000$"):
        kept.take("r1-0", over.prompt_hash)
