"""What people see of the event stream, read over the bus."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from common.bus.memory import MemoryBus, MemoryServer
from common.bus.port import StreamConfig
from common.runtime.clock import SystemClock
from contracts import subjects
from contracts.codec import encode
from contracts.errors import InvalidValueError
from contracts.events import EventName, HandoffEvent
from services.launcher.console import Console
from services.launcher.show import follow_events, show_timeline
from services.launcher.stream import read_all, read_handoffs

_WAIT_S = 10.0
TRACE = "a" * 32


class _Screen:
    """A console whose output can be waited for."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.progress = io.StringIO()
        self.console = Console(SystemClock(), out=self.out, progress=self.progress)

    async def shows(self, text: str) -> None:
        async with asyncio.timeout(_WAIT_S):
            while text not in self.out.getvalue():  # noqa: ASYNC110 - a screen cannot be waited for
                await asyncio.sleep(0)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    """A bus with the event stream."""
    bus = MemoryServer(SystemClock()).connect()
    await bus.ensure_stream(StreamConfig(name=subjects.EVENTS_STREAM, subjects=(subjects.EVENTS_FILTER,)))
    yield bus
    await bus.close()


def _tell(bus: MemoryBus, handoff: str, name: EventName, at_ns: int, trace_id: str = "") -> None:
    event = HandoffEvent(
        event=name,
        service="broker",
        instance="broker-0",
        handoff_id=handoff,
        request_id=handoff.rpartition("-")[0],
        at="2025-01-01T00:00:00+00:00",
        at_ns=at_ns,
        trace_id=trace_id,
    )
    assert bus.publish_event(subjects.event("broker", handoff, name), encode(event), message_id=f"{handoff}{at_ns}")


async def test_a_request_is_shown_attempt_by_attempt(bus: MemoryBus) -> None:
    """A request's id finds all of its attempts, and nobody else's events."""
    for place, handoff in enumerate(("rab-0", "rab-2", "rabc-0")):
        _tell(bus, handoff, EventName.REQUEST_SUBMITTED, place)
        _tell(bus, handoff, EventName.REQUEST_FINISHED, place + 5_000_000)
    await bus.flush_events()
    screen = _Screen()
    assert await show_timeline(bus, "rab", screen.console) == 0
    headings = [line for line in screen.out.getvalue().splitlines() if line.startswith("handoff")]
    assert [line.split()[1] for line in headings] == ["rab-0:", "rab-2:"]
    assert "total       5.0 ms" in screen.out.getvalue()


async def test_every_attempt_of_a_long_story_is_shown(bus: MemoryBus) -> None:
    """An answer that gave way over and over has more attempts than one looks for in vain; some left no event behind."""
    numbers = [number for number in range(80) if number % 16 == 15]
    for number in numbers:
        _tell(bus, f"rab-{number}", EventName.REQUEST_SUBMITTED, number)
    await bus.flush_events()
    told = await read_handoffs(bus, "rab")
    assert [event.handoff_id for event in told.events] == [f"rab-{number}" for number in numbers]


async def test_a_handoff_is_shown_alone(bus: MemoryBus) -> None:
    """A handoff's id finds that attempt only."""
    _tell(bus, "rab-0", EventName.REQUEST_SUBMITTED, 1)
    _tell(bus, "rab-1", EventName.REQUEST_SUBMITTED, 2)
    await bus.flush_events()
    told = await read_handoffs(bus, "rab-1")
    assert [event.handoff_id for event in told.events] == ["rab-1"]


@pytest.mark.parametrize("name", [TRACE, f"00-{TRACE}-{'c' * 16}-01"])
async def test_a_trace_finds_all_of_its_requests(bus: MemoryBus, name: str) -> None:
    """The choices of a completion are requests of one trace: its id or a traceparent shows them all, whatever events lack it."""
    for place, (handoff, trace) in enumerate((("rab-0", TRACE), ("rcd-0", TRACE), ("ref-0", "b" * 32))):
        _tell(bus, handoff, EventName.REQUEST_SUBMITTED, place, trace)
        _tell(bus, handoff, EventName.REQUEST_FINISHED, place + 5_000_000)
    await bus.flush_events()
    screen = _Screen()
    assert await show_timeline(bus, name, screen.console) == 0
    lines = screen.out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("handoff")] == ["rab-0:", "rcd-0:"]
    assert sum("request finished" in line for line in lines) == 2


async def test_a_completion_names_the_other_choices(bus: MemoryBus) -> None:
    """They are requests of their own, which only the trace joins; alone, nothing is said."""
    _tell(bus, "rab-0", EventName.REQUEST_SUBMITTED, 1, TRACE)
    await bus.flush_events()
    screen = _Screen()
    assert await show_timeline(bus, "cmpl-rab", screen.console) == 0
    assert "same trace" not in screen.out.getvalue()
    _tell(bus, "rcd-0", EventName.REQUEST_SUBMITTED, 2, TRACE)
    await bus.flush_events()
    assert await show_timeline(bus, "cmpl-rab", screen.console) == 0
    assert screen.out.getvalue().endswith(
        f"of the same trace, as the other choices of a completion are: rcd\npdmesh timeline {TRACE} shows all of them\n"
    )


async def test_an_unknown_name_fails(bus: MemoryBus) -> None:
    """Nothing on standard output, the reason on standard error, and status 1."""
    screen = _Screen()
    assert await show_timeline(bus, "rzz", screen.console) == 1
    assert screen.out.getvalue() == ""
    assert "PD_EVENTS holds no event of rzz" in screen.progress.getvalue()


async def test_a_name_that_is_no_id_is_refused(bus: MemoryBus) -> None:
    """A wildcard would show somebody else's request."""
    with pytest.raises(InvalidValueError, match=r"ID: '\*'"):
        await read_handoffs(bus, "*")


async def test_unreadable_messages_are_counted(bus: MemoryBus) -> None:
    """A message of a newer build does not hide the others, and is not passed over in silence."""
    bus.publish_event(subjects.event("broker", "rab-0", "strange"), b'{"v": 99}', message_id="x")
    _tell(bus, "rab-0", EventName.REQUEST_SUBMITTED, 1)
    await bus.flush_events()
    told = await read_all(bus)
    assert (len(told.events), told.num_unreadable) == (1, 1)
    screen = _Screen()
    assert await show_timeline(bus, "rab-0", screen.console) == 0
    assert "1 messages that this build cannot read" in screen.progress.getvalue()


async def test_events_are_followed_without_a_gap_or_a_repeat(bus: MemoryBus) -> None:
    """First what the stream has kept, then what happens, each once."""
    _tell(bus, "rab-0", EventName.REQUEST_SUBMITTED, 1)
    await bus.flush_events()
    screen = _Screen()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow_events(bus, screen.console, from_start=True), name="follow")
        await screen.shows("request_submitted")
        _tell(bus, "rab-0", EventName.REQUEST_FINISHED, 2)
        await screen.shows("request_finished")
        following.cancel()
    lines = screen.out.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["request_submitted", "request_finished"]
