"""Any delivery of the frames of a stream that loses nothing gives the stream."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.requests import FinishReason, TokenFrame
from services.router.core.token_order import End, TokenOrder


@given(st.data())
def test_shuffled_repeated_overlapping_frames_give_every_token_once(data: st.DataObject) -> None:
    """Tokens come out contiguous and once; the end comes exactly when all are there."""
    count = data.draw(st.integers(1, 12))
    spans = [(index, index + 1) for index in range(count)]
    ends = st.tuples(st.integers(0, count), st.integers(0, count))
    spans += [(min(pair), max(pair)) for pair in data.draw(st.lists(ends, max_size=8))]
    frames = [
        TokenFrame(
            handoff_id="r-0", request_id="r", attempt=0, index=start, token_ids=tuple(range(100 + start, 100 + end))
        )
        for start, end in spans
    ]
    frames.append(
        TokenFrame(
            handoff_id="r-0",
            request_id="r",
            attempt=0,
            index=count,
            final=True,
            num_tokens=count,
            finish_reason=FinishReason.STOP,
        )
    )
    order = TokenOrder(attempt=0)
    got: list[int] = []
    for each in data.draw(st.permutations(frames)):
        assert order.end is None or len(got) == count
        got += order.accept(each)
        assert got == list(range(100, 100 + len(got)))
    assert len(got) == count
    assert order.end == End(FinishReason.STOP, None)
