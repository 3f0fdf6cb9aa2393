"""`pdmesh handoff ID`: what the broker knows of a handoff now."""

from __future__ import annotations

from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.clock import Deadline
from contracts import ids, subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.requests import Refused
from contracts.show import HandoffView, ShowHandoff
from contracts.subjects import BrokerVerb
from services.launcher.console import Console
from services.launcher.core.handoff_view import render_handoff

EXIT_SHOWN: Final = 0
EXIT_NOT_SHOWN: Final = 1

_ANSWER_S: Final = 5.0
_PATIENCE_S: Final = 20.0
"""A broker that stands by takes over within 11 s, on a NATS cluster within 16.5 s, and then reads the records."""
_PAUSE_S: Final = 1.0
_MAX_ATTEMPTS: Final = 256


async def show_handoff(bus: Bus, name: str, console: Console) -> int:
    """Print a handoff, or every attempt of a request; return 1 when it is not known, or no broker answers.

    A completion's `id`, as a client sees it, will do. A takeover is waited for. Raises `InvalidValueError` for what is no id.
    """
    name = ids.check_token("id", name.removeprefix("chat").removeprefix("cmpl-"))
    num_shown = 0
    for handoff_id in (name, *(ids.handoff_id(name, attempt) for attempt in range(_MAX_ATTEMPTS))):
        try:
            answer = await _ask_patiently(bus, handoff_id, console)
        except BusError as error:
            console.say(f"no broker answered within {_PATIENCE_S:g} s ({error.code}): none leads")
            return EXIT_NOT_SHOWN
        if isinstance(answer, HandoffView):
            console.show(("\n" if num_shown else "") + render_handoff(answer))
            num_shown += 1
            if handoff_id == name:
                break
        elif answer.error.code is not ErrorCode.UNKNOWN_HANDOFF:
            console.say(f"the broker refused: {answer.error.message}")
            return EXIT_NOT_SHOWN
        elif handoff_id != name:
            break  # attempts are numbered without gaps
    if not num_shown:
        console.say(f"the broker knows nothing of {name}; its events may still be there: pdmesh timeline {name}")
    return EXIT_SHOWN if num_shown else EXIT_NOT_SHOWN


async def _ask_patiently(bus: Bus, handoff_id: str, console: Console) -> HandoffView | Refused:
    """Ask until a broker answers. Raises `BusError` when none has for longer than a takeover lasts."""
    deadline = Deadline.after(console.clock, _PATIENCE_S)
    waits = False
    while True:
        try:
            return await _ask(bus, handoff_id)
        except BusError as error:
            if deadline.remaining <= 0:
                raise
            if not waits:
                console.say(
                    f"no broker answers ({error.code}); another one may be taking over: asking again for {_PATIENCE_S:g} s"
                )
            waits = True
            await console.clock.sleep(min(_PAUSE_S, deadline.remaining))


async def _ask(bus: Bus, handoff_id: str) -> HandoffView | Refused:
    data = encode(ShowHandoff(handoff_id=handoff_id))
    reply = await bus.request(subjects.broker_rpc(BrokerVerb.SHOW), data, timeout=_ANSWER_S)
    answer: HandoffView | Refused = decode(reply.data, HandoffView | Refused)  # type: ignore[arg-type]  # a union is not a type
    return answer
