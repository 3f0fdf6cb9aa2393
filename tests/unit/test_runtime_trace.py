"""W3C Trace Context: what is read, what is passed on, and what the running task sends along."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest
import structlog

from common.bus.handoff_events import HandoffEvents
from common.bus.memory import MemoryServer
from common.bus.rpc import RpcEdge
from common.bus.storage import EVENTS_CONFIG
from common.runtime.clock import SystemClock
from common.runtime.logging import configure_logging
from common.runtime.trace import current_trace, new_trace, next_hop, received, traced, within
from contracts import subjects
from contracts.codec import decode, encode
from contracts.events import EventName, HandoffEvent
from contracts.requests import Ping, Pong
from contracts.trace import TraceContext, read_trace

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_header_is_read_and_written_back() -> None:
    """Trace id, span id and flags come back as they were."""
    trace = read_trace({"traceparent": VALID})
    assert trace == TraceContext(trace_id=TRACE, span_id=SPAN, flags=1)
    assert trace.traceparent == VALID


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        VALID.upper(),
        VALID[:-1],
        f"{VALID}-",
        f"{VALID}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f" {VALID}",
        f"{VALID}\n",
        f"00-{TRACE}-{SPAN}-0x",
        f"01-{TRACE}-{SPAN}-01.more",
        f"0²-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_header_is_as_if_there_were_none(header: str) -> None:
    """It is never an error."""
    assert read_trace({"traceparent": header}) is None
    assert received({"traceparent": header}) is None


def test_a_future_version_is_read_as_far_as_this_one_goes() -> None:
    """More may follow after a dash; flags that are not known are dropped, and what is written is version 00."""
    trace = read_trace({"traceparent": f"cc-{TRACE}-{SPAN}-ff-what-the-future-brings"})
    assert trace is not None
    assert trace.traceparent == f"00-{TRACE}-{SPAN}-03"


def test_the_state_is_passed_on_unchanged_or_not_at_all() -> None:
    """A list that the standard allows travels with each hop; one that it does not is left out."""
    state = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE,fw529a3039@dt=x y"
    trace = read_trace({"traceparent": VALID, "tracestate": state})
    assert trace is not None
    assert trace.child("1" * 16).headers == {"traceparent": f"00-{TRACE}-{'1' * 16}-01", "tracestate": state}
    for bad in ("no-value", "UPPER=1", "a=1,a=2", "a=\x07", f"a={'x' * 257}", ",".join(f"k{n}=v" for n in range(33))):
        trace = read_trace({"traceparent": VALID, "tracestate": bad})
        assert trace is not None
        assert trace.headers == {"traceparent": VALID}


def test_each_hop_has_a_span_of_its_own() -> None:
    """The trace stays, the span is new, and its parent is known."""
    trace = received({"traceparent": VALID})
    assert trace is not None
    assert (trace.trace_id, trace.parent_span_id) == (TRACE, SPAN)
    assert trace.span_id != SPAN
    assert next_hop(None) is None
    fresh = new_trace()
    assert read_trace(fresh.headers) == fresh
    assert new_trace().trace_id != fresh.trace_id


async def test_a_task_inherits_the_trace_of_whoever_started_it() -> None:
    """It keeps it when the starter goes on to something else; outside of every request there is none."""
    trace = new_trace()
    seen = []

    async def look() -> None:
        await asyncio.sleep(0)
        seen.append(current_trace())

    async with asyncio.TaskGroup() as group:
        with within(trace):
            group.create_task(look(), name="inside")
            with within(None):
                group.create_task(look(), name="of nobody")
            assert traced({"traceparent": "mine"})["traceparent"] == "mine"
        group.create_task(look(), name="outside")
    assert seen == [trace, None, None]
    assert traced(None) == {}


async def test_messages_answers_and_events_carry_the_trace() -> None:
    """Publish, request, its answer and an event of the stream: the same trace, a hop for each process."""
    server = MemoryServer(SystemClock())
    asker, callee = server.connect(), server.connect()
    await asker.ensure_stream(EVENTS_CONFIG)
    plain = await callee.subscribe("plain")
    events = HandoffEvents(callee, SystemClock(), service="broker", instance="broker-0")
    trace = new_trace()

    async def pong(_: bytes) -> Pong:
        events.publish(EventName.REQUEST_SUBMITTED, handoff_id="r1-0", request_id="r1")
        return Pong(broker_id="broker-0", max_timeout_ms=1)

    async with asyncio.TaskGroup() as group:
        read = await RpcEdge(callee, group, structlog.get_logger()).serve("pd.v1.rpc.broker.0.*", {"ping": pong})
        reading = group.create_task(read(), name="rpc")
        with within(trace):
            await asker.publish("plain", b"")
            answer = await asker.request("pd.v1.rpc.broker.0.ping", encode(Ping()))
        assert current_trace() is None
        untraced = await asker.request("pd.v1.rpc.broker.0.ping", encode(Ping()))
        reading.cancel()
    assert (await anext(plain)).headers == trace.headers
    answered = read_trace(answer.headers)
    assert answered is not None
    assert answered.trace_id == trace.trace_id
    assert answered.span_id != trace.span_id
    assert untraced.headers == {}
    assert await callee.flush_events()
    first, second = [stored async for stored in asker.read_stream(subjects.EVENTS_STREAM)]
    event = decode(first.data, HandoffEvent)
    assert (event.trace_id, event.span_id, event.parent_span_id) == (
        trace.trace_id,
        answered.span_id,
        trace.span_id,
    )
    assert first.headers["traceparent"] == answered.traceparent
    assert decode(second.data, HandoffEvent).trace_id == ""
    assert "traceparent" not in second.headers


def test_log_lines_of_a_request_name_its_trace() -> None:
    """Inside a trace each line has both ids, outside none."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    sink = io.BytesIO()
    try:
        log = configure_logging("router", stream=sink)
        with within(new_trace()) as trace:
            log.info("request_finished")
        log.info("service_stopped")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    inside, outside = (json.loads(line) for line in sink.getvalue().splitlines())
    assert trace is not None
    assert (inside["trace_id"], inside["span_id"]) == (trace.trace_id, trace.span_id)
    assert "trace_id" not in outside
