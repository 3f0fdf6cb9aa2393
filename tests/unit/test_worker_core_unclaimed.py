"""Which prompts are asked about, when, and what the answer says."""

from __future__ import annotations

import base64
import hashlib
from array import array
from typing import Any

import pytest

from common.worker.core.prompts import PromptBuffer
from common.worker.core.unclaimed import UNCLAIMED_S, Needless, Outcome, Unclaimed, why_needless
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.requests import Accepted, FinishReason, PromptFrame, Refused, TokenFrame

DUE = UNCLAIMED_S


def frame(handoff: str = "r1-0", **says: Any) -> PromptFrame:
    """The first of two frames of a prompt of two tokens."""
    data = array("I", [1]).tobytes()
    values: dict[str, Any] = {
        "handoff_id": handoff,
        "index": 0,
        "num_frames": 2,
        "num_prompt_tokens": 2,
        "prompt_hash": hashlib.sha256(data * 2).hexdigest(),
        "timeout_ms": 600_000,
        "ids_b64": base64.b64encode(data).decode(),
    }
    return PromptFrame(**(values | says))


def buffer() -> PromptBuffer:
    """Room for a hundred tokens."""
    return PromptBuffer(max_tokens=100, vocab_size=1000)


def due(kept: PromptBuffer, now: float, limit: int = 9) -> list[str]:
    """The handoffs that are asked about."""
    return [each.handoff_id for each in kept.take_unclaimed(now, limit=limit)]


def refused(handoff: str, code: ErrorCode) -> Refused:
    """A refusal of the broker's."""
    return Refused(handoff_id=handoff, error=ErrorInfo(code=code, message="no"))


def end(handoff: str = "r1-0", **says: Any) -> TokenFrame:
    """How a handoff ended."""
    values: dict[str, Any] = {
        "handoff_id": handoff,
        "request_id": "r1",
        "attempt": 0,
        "index": 0,
        "num_tokens": 0,
        "final": True,
    }
    return TokenFrame(**(values | says))


def test_a_prompt_is_due_half_a_minute_behind_its_last_frame_and_again_as_long_after() -> None:
    """Frames that come, also again, put it off; its deadline is that of its first frame."""
    kept = buffer()
    kept.add(frame(), now=0.0)
    kept.add(frame(index=1), now=10.0)
    kept.add(frame(index=1), now=20.0)
    assert due(kept, 20.0 + DUE - 0.01) == []
    assert kept.take_unclaimed(20.0 + DUE, limit=9) == (Unclaimed(handoff_id="r1-0", heard_at=20.0, deadline=600.0),)
    assert due(kept, 20.0 + 2 * DUE - 0.01) == []
    assert due(kept, 20.0 + 2 * DUE) == ["r1-0"]


def test_a_frame_that_is_refused_puts_nothing_off() -> None:
    """Whoever sends nonsense keeps no prompt here."""
    kept = buffer()
    kept.add(frame(), now=0.0)
    with pytest.raises(InvalidValueError):
        kept.add(frame(index=2), now=20.0)
    assert due(kept, DUE) == ["r1-0"]


def test_those_that_have_been_due_for_longest_come_first_and_none_starves() -> None:
    """With room for two questions at a time, everyone's turn comes before anybody's second."""
    kept = buffer()
    for number, handoff in enumerate(("c", "a", "b", "d", "e")):
        kept.add(frame(handoff), now=number / 10)
    assert due(kept, 2 * DUE, limit=2) == ["c", "a"]
    assert due(kept, 3 * DUE, limit=2) == ["b", "d"]
    assert due(kept, 4 * DUE, limit=2) == ["e", "a"]
    assert due(kept, 4 * DUE, limit=0) == []
    assert due(kept, 4 * DUE, limit=9) == ["c", "b", "d"]


def test_a_prompt_is_still_the_same_until_it_goes_or_more_of_it_comes() -> None:
    """What was asked about before that says nothing about it."""
    kept = buffer()
    kept.add(frame(), now=0.0)
    (asked,) = kept.take_unclaimed(DUE, limit=1)
    assert kept.is_still(asked)
    kept.add(frame(index=1), now=DUE + 1)
    assert not kept.is_still(asked)
    (asked,) = kept.take_unclaimed(3 * DUE, limit=1)
    assert kept.is_still(asked)
    kept.drop("r1-0")
    assert not kept.is_still(asked)
    assert due(kept, 9 * DUE) == []


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (refused("r1-0", ErrorCode.UNKNOWN_HANDOFF), Needless.UNKNOWN),
        (end(finish_reason=FinishReason.LENGTH), Needless.ENDED),
        (end(error=ErrorInfo(code=ErrorCode.CANCELLED, message="gone")), Needless.ENDED),
        (Accepted(handoff_id="r1-0"), None),
        (end(final=False), None),
        (refused("r1-0", ErrorCode.OVERLOADED), None),
        (refused("unknown", ErrorCode.UNKNOWN_HANDOFF), None),
        (end("r2-0"), None),
        (None, None),
    ],
    ids=str,
)
def test_only_what_is_over_or_unknown_lets_a_prompt_go(outcome: Outcome | None, reason: Needless | None) -> None:
    """An answer about another handoff tells nothing, nor does one of a broker that is busy, or none."""
    assert why_needless("r1-0", outcome) is reason
