"""What `pdmesh timeline`, `events`, `links` and `settings` print."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.bus.port import Bus, Message
from common.runtime.setting_list import settings_of
from common.worker.core.role_settings import concerns
from contracts import subjects
from contracts.errors import CodecError
from contracts.events import HandoffEvent
from contracts.links import LinkEvent
from contracts.trace import trace_id_of
from contracts.workers import SettingEvent, WorkerRole
from services.launcher.console import Console
from services.launcher.core.links import render_link_event, render_links
from services.launcher.core.setting_event import render_setting_event
from services.launcher.core.setting_table import render_settings
from services.launcher.core.table import render, render_event
from services.launcher.core.timeline import build, by_handoff
from services.launcher.settings import settings_structs
from services.launcher.stream import MeshEvent, read_all, read_event, read_handoffs, read_links, read_trace

EXIT_FOUND = 0
EXIT_UNKNOWN = 1
_WHERE_ELSE = "a request that no worker was found for has none, and the x-request-id of a client is in the router's log alone, beside its trace"


async def show_timeline(bus: Bus, name: str, console: Console) -> int:
    """Print the timeline of a handoff, or of every attempt of a request or a trace; return 1 if the stream knows nothing of it.

    A completion's `id`, as a client sees it, will do: then the other requests of its trace are named, as the choices of one
    completion are. So will a trace id or a traceparent.
    """
    trace_id = trace_id_of(name)
    told = await (read_handoffs(bus, _internal(name)) if trace_id is None else read_trace(bus, trace_id))
    _tell_unreadable(told.num_unreadable, console)
    handoffs = by_handoff(told.events)
    for place, events in enumerate(handoffs.values()):
        console.show(("\n" if place else "") + render(build(events)))
    if not handoffs:
        console.say(f"{subjects.EVENTS_STREAM} holds no event of {name}: {_WHERE_ELSE}")
        return EXIT_UNKNOWN
    if _internal(name) != name:
        await _name_others(bus, told.events, console)
    return EXIT_FOUND


async def _name_others(bus: Bus, events: Sequence[HandoffEvent], console: Console) -> None:
    """Say which other requests belong to the trace of these events, if any do."""
    trace_id = next((event.trace_id for event in events if event.trace_id), "")
    if not trace_id:
        return
    others = {event.request_id for event in (await read_trace(bus, trace_id)).events}
    others -= {event.request_id for event in events}
    if others:
        console.show(f"\nof the same trace, as the other choices of a completion are: {', '.join(sorted(others))}")
        console.show(f"pdmesh timeline {trace_id} shows all of them")


async def show_links(bus: Bus, console: Console) -> int:
    """Print how every prefill worker stands with every decode worker, and why; return 1 if there is no pair of them."""
    told = await read_links(bus)
    _tell_unreadable(told.num_unreadable, console)
    roles = {worker.role for worker in told.workers}
    if not told.links and not {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles:
        shown = ", ".join(worker.worker_id for worker in told.workers) or "none"
        console.say(f"there is no pair of a prefill and a decode worker; workers that are registered: {shown}")
        return EXIT_UNKNOWN
    console.show(render_links(told.links, told.workers))
    return EXIT_FOUND


async def follow_events(bus: Bus, console: Console, *, from_start: bool) -> None:
    """Print events as they come, until cancelled; with `from_start`, first those that the stream has kept."""
    async with await bus.subscribe(subjects.EVENTS_FILTER) as subscription:
        shown: set[MeshEvent] = set()
        if from_start:
            told = await read_all(bus)
            _tell_unreadable(told.num_unreadable, console)
            for event in told.all:
                console.show(_render(event))
            shown.update(told.all)
        async for message in subscription:
            fresh = _read(message)
            if fresh is None:
                _tell_unreadable(1, console)
            elif fresh not in shown:
                console.show(_render(fresh))


def show_settings(role: str | None, console: Console) -> int:
    """Print what a role can be told; without one, what all can, those with the same settings together.

    Of a worker's settings a role shows those that it looks at.
    """
    titles: dict[type[msgspec.Struct], list[str]] = {}
    for name, struct in settings_structs().by_role.items():
        if role in {None, name}:
            titles.setdefault(struct, []).append(name)
    worker = WorkerRole(role) if role in set(WorkerRole) else None
    blocks = (
        render_settings(
            ", ".join(names),
            (each for each in settings_of(struct) if worker is None or concerns(each.name, worker)),
        )
        for struct, names in titles.items()
    )
    console.show("\n\n".join(blocks))
    return EXIT_FOUND


def _internal(name: str) -> str:
    """Our own id of what a client knows as `cmpl-...` or `chatcmpl-...`."""
    return name.removeprefix("chat").removeprefix("cmpl-")


def _render(event: MeshEvent) -> str:
    match event:
        case LinkEvent():
            return render_link_event(event)
        case SettingEvent():
            return render_setting_event(event)
        case HandoffEvent():
            return render_event(event)


def _read(message: Message) -> MeshEvent | None:
    try:
        return read_event(message.data)
    except CodecError:
        return None


def _tell_unreadable(count: int, console: Console) -> None:
    if count:
        console.say(f"{count} messages that this build cannot read were passed over")
