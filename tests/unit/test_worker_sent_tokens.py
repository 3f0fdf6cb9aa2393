"""Tokens are kept whole until their router has them, within bounds."""

import pytest

from common.worker.core import sent_tokens
from common.worker.core.ended_streams import EndedStreams
from common.worker.core.sent_tokens import SentTokens
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.requests import FinishReason, TokenFrame


def tokens(count: int) -> SentTokens:
    """A stream of tokens 100, 101, ..."""
    made = SentTokens(handoff_id="r1-0", request_id="r1", attempt=0)
    for number in range(count):
        made.add((100 + number,))
    return made


def frame(index: int, *token_ids: int) -> TokenFrame:
    """A frame of it that is not its last."""
    return TokenFrame(handoff_id="r1-0", request_id="r1", attempt=0, index=index, token_ids=token_ids)


def test_any_token_can_be_told_again() -> None:
    """A frame holds what there is from its index on, sent or not; at the end of what there is, nothing."""
    made = tokens(3)
    made.num_sent = 2
    assert made.num_waiting == 1
    assert [made.frame(index) for index in range(4)] == [
        frame(0, 100, 101, 102),
        frame(1, 101, 102),
        frame(2, 102),
        frame(3),
    ]


@pytest.mark.parametrize("index", [-1, 4])
def test_a_token_that_there_is_not_yet_is_refused(index: int) -> None:
    """The error names the field and the range."""
    with pytest.raises(InvalidValueError, match=r"index: .* the rule is: 0 to 3"):
        tokens(3).frame(index)


def test_the_end_comes_with_the_last_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not go into one frame comes in several; only the one that reaches the end is final, and counts all tokens."""
    monkeypatch.setattr(sent_tokens, "MAX_FRAME_TOKENS", 2)
    made = tokens(3)
    made.num_cached_tokens = 16
    made.end(FinishReason.LENGTH, None)
    first = made.frame(0)
    assert (first.token_ids, first.final, first.num_tokens, first.finish_reason) == ((100, 101), False, 0, None)
    last = made.frame(2)
    assert (last.token_ids, last.final, last.num_tokens, last.finish_reason) == ((102,), True, 3, FinishReason.LENGTH)
    assert made.frame(3).final
    assert {each.num_cached_tokens for each in (first, last)} == {16}


def test_a_later_attempt_goes_on_behind_the_delivered_tokens() -> None:
    """Indices and the count are those of the whole request; what earlier attempts told is not this one's to tell, nor kept."""
    made = SentTokens(handoff_id="r1-1", request_id="r1", attempt=1, num_delivered_tokens=5)
    assert (made.is_silent, made.num_waiting, made.num_tokens, len(made)) == (True, 0, 5, 0)
    made.add((105, 106))
    made.end(FinishReason.LENGTH, None)
    frame_of_all = made.frame(5)
    assert (frame_of_all.index, frame_of_all.token_ids, frame_of_all.final) == (5, (105, 106), True)
    assert (frame_of_all.num_tokens, made.num_waiting, len(made)) == (7, 2, 2)
    assert made.frame(6).token_ids == (106,)
    for index in (4, 8):
        with pytest.raises(InvalidValueError, match=r"the rule is: 5 to 7"):
            made.frame(index)


def test_an_error_comes_with_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame before the last says nothing of it; one of a stream that goes on has neither reason nor error."""
    monkeypatch.setattr(sent_tokens, "MAX_FRAME_TOKENS", 2)
    made = tokens(3)
    running = made.frame(2)
    assert (running.final, running.finish_reason, running.error) == (False, None, None)
    error = ErrorInfo(code=ErrorCode.INTERNAL, message="a rank is gone")
    made.end(None, error)
    first, last = made.frame(0), made.frame(2)
    assert (first.final, first.error) == (False, None)
    assert (last.final, last.finish_reason, last.error) == (True, None, error)
    ended = tokens(0)
    ended.end(None, None)
    assert ended.frame(0) == TokenFrame(
        handoff_id="r1-0", request_id="r1", attempt=0, index=0, token_ids=(), final=True, num_tokens=0
    )
    with pytest.raises(InvalidValueError, match=r"^index: 4 is not allowed; the rule is: 0 to 3$"):
        made.frame(4)


def test_ended_streams_are_given_back_and_all_of_their_tokens_count() -> None:
    """The stream itself; many short ones fill the room as one long one does."""
    kept = EndedStreams(max_tokens=10)
    streams = {name: tokens(4) for name in "abc"}
    for name, stream in streams.items():
        kept.keep(name, stream, until=9.0)
    assert [kept.get(name) for name in "abc"] == [None, streams["b"], streams["c"]]


def test_ended_streams_go_when_they_are_forgotten_or_their_moment_comes() -> None:
    """Each has a moment of its own; forgetting twice, or what is not there, is fine."""
    kept = EndedStreams()
    kept.keep("a", tokens(1), until=5.0)
    kept.keep("b", tokens(1), until=7.0)
    kept.expire(5.0)
    assert (kept.get("a"), kept.get("b") is not None) == (None, True)
    kept.forget("b")
    kept.forget("b")
    assert len(kept) == 0


def test_ended_streams_are_bounded_by_number_and_by_tokens() -> None:
    """The oldest make room; one that is longer than all the room stays until the next comes; one kept anew counts once."""
    kept = EndedStreams(max_streams=2, max_tokens=10)
    for name, length in (("a", 1), ("b", 1), ("b", 2), ("c", 3)):
        kept.keep(name, tokens(length), until=9.0)
    assert [name for name in "abc" if kept.get(name)] == ["b", "c"]
    kept.keep("d", tokens(50), until=9.0)
    assert [name for name in "bcd" if kept.get(name)] == ["d"]
    kept.keep("e", tokens(8), until=9.0)
    kept.keep("f", tokens(2), until=9.0)
    assert [name for name in "def" if kept.get(name)] == ["e", "f"]
