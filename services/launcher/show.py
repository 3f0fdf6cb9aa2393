"""`pdmesh timeline` and `pdmesh events`: what the event stream tells people."""

from __future__ import annotations

from common.bus.port import Bus, Message
from contracts import subjects
from contracts.codec import decode
from contracts.errors import CodecError
from contracts.events import HandoffEvent
from services.launcher.console import Console
from services.launcher.core.table import render, render_event
from services.launcher.core.timeline import build, by_handoff
from services.launcher.stream import read_all, read_handoffs

EXIT_FOUND = 0
EXIT_UNKNOWN = 1


async def show_timeline(bus: Bus, name: str, console: Console) -> int:
    """Print the timeline of a handoff, or of every attempt of a request; return 1 if the stream knows nothing of it.

    A completion's `id`, as a client sees it, will do.
    """
    told = await read_handoffs(bus, _internal(name))
    _tell_unreadable(told.num_unreadable, console)
    handoffs = by_handoff(told.events)
    for place, events in enumerate(handoffs.values()):
        console.show(("\n" if place else "") + render(build(events)))
    if not handoffs:
        console.say(f"{subjects.EVENTS_STREAM} holds no event of {name}")
        return EXIT_UNKNOWN
    return EXIT_FOUND


async def follow_events(bus: Bus, console: Console, *, from_start: bool) -> None:
    """Print events as they come, until cancelled; with `from_start`, first those that the stream has kept."""
    async with await bus.subscribe(subjects.EVENTS_FILTER) as subscription:
        shown: set[HandoffEvent] = set()
        if from_start:
            told = await read_all(bus)
            _tell_unreadable(told.num_unreadable, console)
            for event in told.events:
                console.show(render_event(event))
            shown.update(told.events)
        async for message in subscription:
            fresh = _read(message)
            if fresh is None:
                _tell_unreadable(1, console)
            elif fresh not in shown:
                console.show(render_event(fresh))


def _internal(name: str) -> str:
    """Our own id of what a client knows as `cmpl-...` or `chatcmpl-...`."""
    return name.removeprefix("chat").removeprefix("cmpl-")


def _read(message: Message) -> HandoffEvent | None:
    try:
        return decode(message.data, HandoffEvent)
    except CodecError:
        return None


def _tell_unreadable(count: int, console: Console) -> None:
    if count:
        console.say(f"{count} messages that this build cannot read were passed over")
