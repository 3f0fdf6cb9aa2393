"""Frames that repeat, overlap or come out of order give one contiguous stream."""

from typing import Any

import pytest

from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import FinishReason, TokenFrame
from services.router.core.token_order import MAX_WAITING_FRAMES, End, TokenOrder


def frame(index: int, *token_ids: int, attempt: int = 0, **fields: Any) -> TokenFrame:
    """A frame of request r1."""
    return TokenFrame(
        handoff_id=f"r1-{attempt}", request_id="r1", attempt=attempt, index=index, token_ids=token_ids, **fields
    )


def end_of(order: TokenOrder) -> End | None:
    """How it ended, read anew."""
    return order.end


def test_frames_in_order() -> None:
    """Each frame gives its tokens; the final frame gives the end."""
    order = TokenOrder(attempt=0)
    assert list(order.accept(frame(0, 7, num_cached_tokens=16))) == [7]
    assert end_of(order) is None
    assert list(order.accept(frame(1, 8, 9, final=True, num_tokens=3, finish_reason=FinishReason.LENGTH))) == [8, 9]
    assert end_of(order) == End(FinishReason.LENGTH, None)
    assert order.num_cached_tokens == 16


def test_repeats_and_overlaps_give_nothing_twice() -> None:
    """A repeated token is dropped, the rest of its frame is kept."""
    order = TokenOrder(attempt=0)
    order.accept(frame(0, 1, 2))
    assert list(order.accept(frame(0, 1, 2))) == []
    assert list(order.accept(frame(1, 2, 3))) == [3]


def test_late_frames_wait_for_earlier_ones() -> None:
    """The end counts only once everything before it has come."""
    order = TokenOrder(attempt=0)
    order.accept(frame(3, 4, final=True, num_tokens=4, finish_reason=FinishReason.STOP))
    assert end_of(order) is None
    assert order.gap
    order.accept(frame(1, 2, 3))
    assert list(order.accept(frame(0, 1))) == [1, 2, 3, 4]
    assert end_of(order) == End(FinishReason.STOP, None)
    assert not order.gap


def test_superseded_attempts_are_ignored() -> None:
    """What another attempt still sends changes nothing, not even its end."""
    order = TokenOrder(attempt=1)
    assert list(order.accept(frame(0, 5, attempt=0, final=True, num_tokens=1, finish_reason=FinishReason.STOP))) == []
    assert end_of(order) is None


def test_an_error_ends_at_once() -> None:
    """After an error the missing tokens will never come."""
    order = TokenOrder(attempt=0)
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
    order.accept(frame(5, final=True, num_tokens=5, error=error))
    assert end_of(order) == End(None, error)


def test_an_error_says_that_what_is_missing_before_another_end_is_lost() -> None:
    """The last frame came and the ones before it did not, and the worker that had them is gone: the broker's word of that counts."""
    order = TokenOrder(attempt=0)
    assert list(order.accept(frame(2, 12, final=True, num_tokens=3, finish_reason=FinishReason.LENGTH))) == []
    assert (end_of(order), order.gap) == (None, True)
    gone = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
    order.accept(frame(0, final=True, num_tokens=0, error=gone))
    assert end_of(order) == End(None, gone)


def test_an_error_behind_the_whole_answer_changes_nothing() -> None:
    """Everything up to the end has come: that the worker is gone by now is nobody's loss."""
    order = TokenOrder(attempt=0)
    order.accept(frame(0, 10, final=True, num_tokens=1, finish_reason=FinishReason.LENGTH))
    gone = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
    order.accept(frame(0, final=True, num_tokens=0, error=gone))
    assert end_of(order) == End(FinishReason.LENGTH, None)


def test_an_attempt_may_begin_later() -> None:
    """A re-dispatched request goes on from the tokens that have been delivered."""
    order = TokenOrder(attempt=2, start=3)
    assert list(order.accept(frame(3, 9, attempt=2))) == [9]
    assert order.next_index == 4
    with pytest.raises(PdmeshError, match="begins at token 1; this attempt began at 3"):
        order.accept(frame(1, 9, attempt=2))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([frame(0, 1), frame(0, 2)], "came twice and differ"),
        ([frame(0, 1, 2, final=True, num_tokens=1, finish_reason=FinishReason.STOP)], "the final frame counts 1"),
        ([frame(2, 1), frame(0, final=True, num_tokens=2, finish_reason=FinishReason.STOP)], "counts 2"),
        ([frame(0, final=True)], "either a finish_reason or an error"),
        ([frame(2 + 2 * place, 1) for place in range(MAX_WAITING_FRAMES + 1)], "token 0 is missing"),
    ],
)
def test_contradictions_are_protocol_errors(frames: list[TokenFrame], message: str) -> None:
    """Frames that cannot be true together end the request, with a bounded number waiting."""
    order = TokenOrder(attempt=0)
    with pytest.raises(PdmeshError, match=message) as caught:
        list(map(order.accept, frames))
    assert caught.value.code is ErrorCode.PROTOCOL


def test_no_cached_tokens_are_reported_before_a_worker_has_said_so() -> None:
    """A cold prompt has none."""
    order = TokenOrder(attempt=0)
    assert order.num_cached_tokens == 0
    order.accept(frame(0, 7))
    assert order.num_cached_tokens == 0


def test_repeats_in_an_attempt_that_began_later_are_held_against_what_came() -> None:
    """Indices count all tokens of the request; what is known of them begins with the attempt."""
    order = TokenOrder(attempt=1, start=5)
    order.accept(frame(5, 10, 11, attempt=1))
    assert list(order.accept(frame(6, 11, 12, attempt=1))) == [12]
    with pytest.raises(PdmeshError, match="tokens from 6 on came twice and differ"):
        order.accept(frame(6, 12, attempt=1))


def test_as_many_frames_wait_as_are_allowed() -> None:
    """They come in turn once the missing one is there; one more had been a loss."""
    order = TokenOrder(attempt=0)
    for index in range(MAX_WAITING_FRAMES):
        assert list(order.accept(frame(1 + index, index))) == []
    with pytest.raises(PdmeshError) as broken:
        order.accept(frame(1 + MAX_WAITING_FRAMES, 9))
    assert broken.value.message == f"token 0 is missing while {MAX_WAITING_FRAMES + 1} later frames wait"


@pytest.mark.parametrize(
    "fields", [{}, {"finish_reason": FinishReason.STOP, "error": ErrorInfo(code=ErrorCode.INTERNAL, message="m")}]
)
def test_a_final_frame_says_one_thing(fields: dict[str, Any]) -> None:
    """Neither nothing nor both."""
    with pytest.raises(PdmeshError) as broken:
        TokenOrder(attempt=0).accept(frame(0, 1, final=True, num_tokens=1, **fields))
    assert broken.value.message == "a final frame has either a finish_reason or an error"


STOP: dict[str, Any] = {"final": True, "finish_reason": FinishReason.STOP}
ERROR: dict[str, Any] = {"final": True, "error": ErrorInfo(code=ErrorCode.INTERNAL, message="m")}


@pytest.mark.parametrize(
    ("came", "told", "advances"),
    [
        ([frame(0, 7)], frame(1, 8), True),
        ([frame(0, 7)], frame(0, 7, 8), True),
        ([frame(0, 7)], frame(0, 7), False),
        ([frame(0, 7)], frame(2, 9), False),
        ([frame(0, 7)], frame(1), False),
        ([frame(0, 7)], frame(1, 8, attempt=1), False),
        ([frame(0, 7)], frame(1, num_tokens=1, **STOP), True),
        ([frame(0, 7)], frame(1, 8, num_tokens=2, **STOP), True),
        ([frame(0, 7)], frame(2, num_tokens=2, **STOP), False),
        ([frame(0, 7)], frame(1, num_tokens=1, attempt=1, **STOP), False),
        ([frame(0, 7)], frame(9, **ERROR), True),
        ([frame(0, 7), frame(3, num_tokens=3, **STOP)], frame(1, num_tokens=1, **STOP), False),
        ([frame(0, 7), frame(3, num_tokens=3, **STOP)], frame(0, **ERROR), True),
        ([frame(0, 7), frame(1, num_tokens=1, **STOP)], frame(1, num_tokens=1, **STOP), False),
        ([frame(0, 7), frame(1, num_tokens=1, **STOP)], frame(1, **ERROR), False),
    ],
)
def test_only_the_next_token_or_the_end_advances_an_attempt(
    came: list[TokenFrame], told: TokenFrame, advances: bool
) -> None:
    """What is said of a frame beforehand is what comes of it."""
    order = TokenOrder(attempt=0)
    for each in came:
        order.accept(each)
    before = order.next_index, order.end
    assert order.advances(told) is advances
    order.accept(told)
    assert ((order.next_index, order.end) != before) is advances
