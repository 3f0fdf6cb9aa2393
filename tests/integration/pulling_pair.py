"""A prefill worker and a decode worker that pulls from it, over fake engines, and what a test asks of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common.bus.storage import EVENTS_CONFIG
from common.engine.fake.engine import FakeEngine
from contracts import subjects
from contracts.codec import decode
from contracts.events import HandoffEvent
from contracts.handoff import (
    Grant,
    PartsAnswer,
    PartsReport,
    PrefillFinished,
    QueryParts,
    Reserved,
)
from contracts.manifest import Role
from contracts.pull import PullEnded, Transfer
from contracts.requests import Accepted, Refused
from contracts.subjects import WorkerVerb
from services.decode.service import DecodeService
from tests.integration.worker_world import HANDOFF, FaultyEngine, Mesh, pair

STATES = {Role.CONV, Role.SSM}


PAGED = {Role.KEY, Role.VALUE}


def engine_of(mesh: Mesh, worker_id: str = "decode-0") -> FakeEngine:
    """The engine of a worker's only replica."""
    engine = mesh.services[worker_id].replicas[0].engine
    assert isinstance(engine, FaultyEngine)
    return engine


async def pulling_pair(mesh: Mesh, **changes: Any) -> DecodeService:
    """A prefill worker of two ranks, and a decode worker that pulls from it."""
    await pair(mesh, **({"transfer": Transfer.PULL} | changes))
    service = mesh.services["decode-0"]
    assert isinstance(service, DecodeService)
    return service


async def computed(mesh: Mesh, handoff: str = HANDOFF) -> Grant:
    """Reserve, compute, and return prefill's grant to read."""
    await mesh.send_prompt("prefill", "prefill-0", handoff)
    reserved = await mesh.reserve(handoff=handoff)
    assert isinstance(reserved, Reserved)
    answer = await mesh.run(reserved, pulled=reserved.pulled)
    assert answer == Accepted(handoff_id=handoff)
    finished = await mesh.heard.get()
    assert isinstance(finished, PrefillFinished)
    assert finished.source is not None
    return finished.source


async def parts_of(mesh: Mesh, role: str, handoff: str = HANDOFF) -> Any:
    """What a worker answers when its reports may have been lost."""
    message = QueryParts(handoff_id=handoff)
    return await mesh.ask(role, f"{role}-0", WorkerVerb.PARTS, message, PartsAnswer | Refused)


async def release(mesh: Mesh, handoff: str = HANDOFF) -> None:
    """Release both workers."""
    for role in ("prefill", "decode"):
        await mesh.release(role, f"{role}-0", handoff)


async def pull_ended(mesh: Mesh) -> PullEnded:
    """The next that the broker hears, which is the end of a pull."""
    ended = await mesh.heard.get()
    assert isinstance(ended, PullEnded)
    return ended


def roles_in(reports: list[PartsReport], transfer: Transfer) -> set[Role]:
    """Which roles were told of, moved in this way."""
    return {part.role for report in reports if report.transfer is transfer for part in report.parts}


@asynccontextmanager
async def event_log(mesh: Mesh) -> AsyncIterator[list[HandoffEvent]]:
    """Every event of handoffs from now on."""
    await mesh.bus.ensure_stream(EVENTS_CONFIG)
    found: list[HandoffEvent] = []
    subject = subjects.handoff_events_filter(HANDOFF)
    await mesh.follow(subject, lambda data: found.append(decode(data, HandoffEvent)))
    yield found
    await mesh.clock.sleep(0.1)
