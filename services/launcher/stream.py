"""What the event stream tells: read back as events of the contract."""

from __future__ import annotations

from typing import Final

import msgspec

from common.bus.port import Bus
from contracts import subjects
from contracts.codec import decode
from contracts.errors import CodecError, InvalidValueError
from contracts.events import HandoffEvent
from contracts.ids import check_token, handoff_id

_MAX_ATTEMPTS: Final = 16


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Events as the stream keeps them, and how many messages there are that this build cannot read."""

    events: tuple[HandoffEvent, ...]
    num_unreadable: int = 0


async def read_all(bus: Bus) -> Told:
    """Every event that the stream holds. Raises as the bus does; a stream that is not there raises StorageRefused."""
    return await _read(bus, subjects.EVENTS_FILTER)


async def read_handoffs(bus: Bus, name: str) -> Told:
    """The events of a handoff, or of each attempt of a request. None is no error. Raises InvalidValueError for a bad id."""
    told = await _read(bus, subjects.handoff_events_filter(check_token("HANDOFF|REQUEST", name)))
    if told.events or told.num_unreadable:
        return told
    events: list[HandoffEvent] = []
    num_unreadable = 0
    for attempt in range(_MAX_ATTEMPTS):
        try:
            subject = subjects.handoff_events_filter(handoff_id(name, attempt))
        except InvalidValueError:  # too long for a request's id, so it is nobody's
            break
        told = await _read(bus, subject)
        events += told.events
        num_unreadable += told.num_unreadable
    return Told(events=tuple(events), num_unreadable=num_unreadable)


async def _read(bus: Bus, subject: str) -> Told:
    events = []
    num_unreadable = 0
    async for stored in bus.read_stream(subjects.EVENTS_STREAM, subject):
        try:
            events.append(decode(stored.data, HandoffEvent))
        except CodecError:
            num_unreadable += 1
    return Told(events=tuple(events), num_unreadable=num_unreadable)
