"""Reading a request's events from the host, with a plain NATS client and nothing of the project."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import nats

from compose.problem import ComposeError

STREAM: Final = "PD_EVENTS"
TIMELINE: Final = (
    "request_submitted",
    "decode_reserved",
    "prefill_started",
    "prefill_finished",
    "taken_over",
    "request_finished",
)
"""What every handoff tells, in this order of its own clock."""

_READ_TIMEOUT_S: Final = 10.0
_COMPLETE_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.25

Event = dict[str, Any]


def check_handoff(url: str, request_id: str) -> list[Event]:
    """The events of a finished request, in order. Raises ComposeError unless they tell the whole handoff.

    That is: each step once and in order, and as many parts, with as many bytes, as the closed ledger says.
    """
    return asyncio.run(_complete(url, request_id))


async def _complete(url: str, request_id: str) -> list[Event]:
    problem = "nothing was read"
    try:
        async with asyncio.timeout(_COMPLETE_TIMEOUT_S):
            while True:  # events about single parts come up to a second late
                events = sorted(await _of_request(url, request_id), key=lambda event: int(event["at_ns"]))
                problem = _problem(events)
                if not problem:
                    return events
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ComposeError(f"the events of request {request_id} do not tell its handoff: {problem}") from None


async def _of_request(url: str, request_id: str) -> list[Event]:
    client = await nats.connect(url, connect_timeout=5, allow_reconnect=False)
    try:
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(STREAM)).state.last_seq
        found: list[Event] = []
        if not last:
            return found
        subscription = await jetstream.subscribe("pd.v1.ev.>", stream=STREAM, ordered_consumer=True)
        async with asyncio.timeout(_READ_TIMEOUT_S):
            async for message in subscription.messages:
                event = json.loads(message.data)
                if event.get("request_id") == request_id:
                    found.append(event)
                if message.metadata.sequence.stream >= last:
                    break
        return found
    finally:
        await client.close()


def _problem(events: list[Event]) -> str:
    """What is missing or wrong; empty if nothing is."""
    names = [event["event"] for event in events]
    for name in (*TIMELINE, "ledger_closed"):
        if names.count(name) != 1:
            return f"{name} is there {names.count(name)} times, among {names}"
    told = [name for name in names if name in TIMELINE]
    if tuple(told) != TIMELINE:
        return f"the order is {told}"
    closed = events[names.index("ledger_closed")]
    parts = [event for event in events if event["event"] == "part_pushed"]
    if len(parts) != closed["num_parts"] or sum(part["num_bytes"] for part in parts) != closed["num_bytes"]:
        return f"{len(parts)} parts are told of {closed['num_parts']}"
    return ""
