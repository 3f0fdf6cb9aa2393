"""What a router says of bodies that it cannot read, what it takes from those that it can, and how it counts ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.openai import ChatMessage, CompletionRequest
from contracts.requests import FinishReason, TokenFrame
from services.router.core import retry_after
from services.router.core.bodies import decode_body
from services.router.core.parameters import read_messages, read_parameters
from services.router.core.retry_after import MAX_ENDS, WINDOW_S, Throughput, seconds_until_room
from services.router.core.token_order import TokenOrder


class Inner(msgspec.Struct):
    """A part of a body."""

    size: int


class Outer(msgspec.Struct):
    """A body."""

    inner: Inner


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        (b"{}", "inner", "inner: Object missing required field `inner`"),
        (b'{"inner": {}}', "inner.size", "inner.size: Object missing required field `size`"),
        (b'{"inner": {"size": "x"}}', "inner.size", "inner.size: Expected `int`, got `str`"),
        (b"[]", None, "body: Expected `object`, got `array`"),
        (b'{"ignored": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "body: it is nested too deeply"),
    ],
    ids=["missing", "missing within", "of another type", "no object", "too deep"],
)
def test_a_body_that_cannot_be_read_is_refused_by_its_place(body: bytes, param: str | None, text: str) -> None:
    """The path of the field, where there is one."""
    with pytest.raises(PdmeshError) as caught:
        decode_body(body, Outer)
    assert (caught.value.message, caught.value.info.param) == (text, param)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def ended(throughput: Throughput, *moments: float) -> Throughput:
    """Requests ended at these moments."""
    for moment in moments:
        throughput.ended(moment)
    return throughput


def test_ends_are_counted_over_a_window_that_moves() -> None:
    """One end tells nothing, two do; what lies exactly at the window's begin is in it; a burst counts as a thousandth of a second."""
    assert ended(Throughput(), 100.0).per_second(110.0) == 0.0
    assert ended(Throughput(), 100.0, 105.0).per_second(110.0) == pytest.approx(0.2)
    assert ended(Throughput(), 100.0, 105.0).per_second(100.0 + WINDOW_S) == pytest.approx(2 / WINDOW_S)
    assert ended(Throughput(), 100.0, 100.0).per_second(100.0) == pytest.approx(2000.0)
    assert ended(Throughput(), 1.0, 100.0, 101.0).per_second(102.0) == pytest.approx(1.0)


def test_only_so_many_ends_are_kept() -> None:
    """The oldest are forgotten: the rate is that of those that are left."""
    throughput = ended(Throughput(), *[0.0] * MAX_ENDS, *[10.0] * MAX_ENDS)
    assert throughput.per_second(12.0) == pytest.approx(MAX_ENDS / 2)
    assert retry_after.MAX_ENDS > 2


def test_a_slow_mesh_is_waited_for() -> None:
    """Also where less than one request ends in a second."""
    assert seconds_until_room(ahead=1, per_second=0.5, least=1, most=60) == 4
    assert seconds_until_room(ahead=0, per_second=0.0, least=7, most=60) == 7


@pytest.mark.parametrize(
    "ends",
    [
        {"finish_reason": None},
        {"finish_reason": FinishReason.STOP, "error": PdmeshError("gone", code=ErrorCode.WORKER_LOST).info},
    ],
)
def test_a_final_frame_that_ends_in_no_way_or_two_is_refused(ends: dict[str, Any]) -> None:
    """Nobody may guess."""
    frame = TokenFrame(
        handoff_id="r1-0", request_id="r1", attempt=0, index=0, token_ids=(), final=True, num_tokens=0, **ends
    )
    with pytest.raises(PdmeshError) as caught:
        TokenOrder(attempt=0).accept(frame)
    assert caught.value.message == "a final frame has either a finish_reason or an error"


SWITCHES = ("stream", "include_usage", "continuous_usage", "return_token_ids", "redispatch")


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, {"redispatch"}),
        ({"redispatch": None}, {"redispatch"}),
        ({"redispatch": False}, set()),
        ({"stream": True}, {"stream", "redispatch"}),
        ({"stream": True, "stream_options": {}}, {"stream", "redispatch"}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream", "include_usage", "redispatch"}),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            {"stream", "continuous_usage", "redispatch"},
        ),
        ({"return_token_ids": True}, {"return_token_ids", "redispatch"}),
    ],
)
def test_switches_of_a_request_are_off_unless_they_are_on(fields: dict[str, Any], on: set[str]) -> None:
    """Another attempt alone is allowed unless it is refused."""
    ask = read_parameters(msgspec.convert({"model": "m", "prompt": "x", **fields}, CompletionRequest))
    assert {name for name in SWITCHES if getattr(ask, name)} == on
    assert all(getattr(ask, name) in {True, False} for name in SWITCHES)


def test_a_part_of_a_message_that_is_no_text_is_not_supported() -> None:
    """Its place is named."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}]
    message = msgspec.convert({"role": "user", "content": parts}, ChatMessage)
    with pytest.raises(PdmeshError) as caught:
        read_messages([message])
    assert (caught.value.code, caught.value.info.param) == (ErrorCode.UNSUPPORTED, "messages[0].content[1].type")
