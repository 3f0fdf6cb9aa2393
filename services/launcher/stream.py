"""What the bus tells people: the event stream and the table of links, read back as structs of the contract."""

from __future__ import annotations

import itertools
from typing import Final, TypeAlias, TypeVar

import msgspec

from common.bus.port import BucketConfig, Bus
from common.bus.storage import LINKS_CONFIG, WORKERS_CONFIG
from contracts import subjects
from contracts.codec import decode
from contracts.errors import CodecError, InvalidValueError
from contracts.events import HandoffEvent
from contracts.ids import check_token, handoff_id
from contracts.links import LinkEvent, LinkRecord
from contracts.workers import SettingEvent, WorkerRecord

MeshEvent: TypeAlias = HandoffEvent | LinkEvent | SettingEvent
T = TypeVar("T")

_MAX_SILENT_ATTEMPTS: Final = 16
"""Attempts in succession without an event, behind which no more are looked for: how many a request may have is the router's to say."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Events as the stream keeps them, and how many messages there are that this build cannot read."""

    all: tuple[MeshEvent, ...]
    num_unreadable: int = 0

    @property
    def events(self) -> tuple[HandoffEvent, ...]:
        """Those about handoffs."""
        return tuple(event for event in self.all if isinstance(event, HandoffEvent))


class ToldLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The table of links, the workers that live, and how many records there are that this build cannot read."""

    links: tuple[LinkRecord, ...]
    workers: tuple[WorkerRecord, ...]
    num_unreadable: int = 0


async def read_all(bus: Bus) -> Told:
    """Every event that the stream holds. Raises as the bus does; a stream that is not there raises StorageRefused."""
    return await _read(bus, subjects.EVENTS_FILTER)


async def read_handoffs(bus: Bus, name: str) -> Told:
    """The events of a handoff, or of each attempt of a request. None is no error. Raises InvalidValueError for a bad id.

    Attempts are looked for one by one, until 16 in succession have no event: a subject's filter cannot name the beginning of a token.
    """
    told = await _read(bus, subjects.handoff_events_filter(check_token("ID", name)))
    if told.all or told.num_unreadable:
        return told
    events: list[MeshEvent] = []
    num_unreadable = 0
    num_silent = 0
    for attempt in itertools.count():
        if num_silent == _MAX_SILENT_ATTEMPTS:
            break
        try:
            subject = subjects.handoff_events_filter(handoff_id(name, attempt))
        except InvalidValueError:  # too long for a request's id, so it is nobody's
            break
        told = await _read(bus, subject)
        num_silent = 0 if told.all or told.num_unreadable else num_silent + 1
        events += told.all
        num_unreadable += told.num_unreadable
    return Told(all=tuple(events), num_unreadable=num_unreadable)


async def read_trace(bus: Bus, trace_id: str) -> Told:
    """The events of all handoffs of one trace. Reads the whole stream: subjects name handoffs, not traces. None is no error."""
    told = await read_all(bus)
    handoffs = {event.handoff_id for event in told.events if event.trace_id == trace_id}
    events = tuple(event for event in told.events if event.handoff_id in handoffs)
    return Told(all=events, num_unreadable=told.num_unreadable)


async def read_links(bus: Bus) -> ToldLinks:
    """How the workers of a mesh stand with each other now. Raises as the bus does."""
    links, num_links = await _read_bucket(bus, LINKS_CONFIG, LinkRecord)
    workers, num_workers = await _read_bucket(bus, WORKERS_CONFIG, WorkerRecord)
    return ToldLinks(links=links, workers=workers, num_unreadable=num_links + num_workers)


def read_event(data: bytes) -> MeshEvent:
    """Decode one event. Raises `CodecError`."""
    event: MeshEvent = decode(data, HandoffEvent | LinkEvent | SettingEvent)  # type: ignore[arg-type]  # a union is not a type
    return event


async def _read(bus: Bus, subject: str) -> Told:
    events = []
    num_unreadable = 0
    async for stored in bus.read_stream(subjects.EVENTS_STREAM, subject):
        try:
            events.append(read_event(stored.data))
        except CodecError:
            num_unreadable += 1
    return Told(all=tuple(events), num_unreadable=num_unreadable)


async def _read_bucket(bus: Bus, config: BucketConfig, kind: type[T]) -> tuple[tuple[T, ...], int]:
    """The records of a bucket in the order of their keys, and how many cannot be read."""
    bucket = await bus.ensure_bucket(config)
    records: list[T] = []
    num_unreadable = 0
    for key in await bucket.keys():
        entry = await bucket.get(key)
        if entry is None:
            continue
        try:
            records.append(decode(entry.value, kind))
        except CodecError:
            num_unreadable += 1
    return tuple(records), num_unreadable
