"""Two requests on a worker whose pool cannot hold both to their end; the test plays broker and router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from common.worker.service import WorkerService
from contracts import subjects
from contracts.codec import decode
from contracts.events import EventName, HandoffEvent
from contracts.handoff import PrefillFinished, RequestEnded, Reserved
from contracts.pull import PullEnded
from contracts.requests import Accepted, SamplingParams, TokenFrame
from contracts.subjects import WorkerVerb
from tests.integration.worker_world import Mesh, mixed_run

OLDER, YOUNGER = "ra-0", "rb-0"
AGAIN = "rb-1"
"""The attempt that follows when the younger one had to end."""


@dataclass(kw_only=True)
class Told:
    """What a router has of one handoff."""

    tokens: list[int] = field(default_factory=list)
    final: TokenFrame | None = None


@dataclass(kw_only=True)
class Outcome:
    """What came of all handoffs, and which events and preemptions there were."""

    told: dict[str, Told]
    ended: dict[str, RequestEnded]
    events: list[tuple[EventName, str]]
    num_preemptions: int
    pulls: list[str]
    """Handoffs whose cache decode has pulled, once for each time."""

    def count(self, event: EventName, handoff_id: str) -> int:
        """How often something happened to a handoff."""
        return self.events.count((event, handoff_id))


async def run_mixed(mesh: Mesh, sampling: dict[str, SamplingParams]) -> Outcome:
    """Requests on a mixed worker, to their end."""
    for handoff, params in sampling.items():
        await mesh.send_prompt("mixed", "mixed-0", handoff)
        message = mixed_run(
            handoff_id=handoff,
            request_id=handoff[:2],
            num_prompt_tokens=len(mesh.prompt(handoff)[0]),
            prompt_hash=mesh.hash_of(handoff),
            sampling=params,
        )
        assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=handoff)
    return await _outcome(mesh, set(sampling), "mixed-0")


async def run_pair(mesh: Mesh, sampling: dict[str, SamplingParams], num_delivered_tokens: int = 0) -> Outcome:
    """Handoffs of a linked pair, to their end; of a later attempt some tokens have been delivered before."""
    for handoff, params in sampling.items():
        await mesh.send_prompt("prefill", "prefill-0", handoff)
        changes: dict[str, Any] = {
            "request_id": handoff[:2],
            "attempt": int(handoff[-1]),
            "num_delivered_tokens": num_delivered_tokens,
        }
        reserved = await mesh.reserve(params, handoff, **changes)
        assert isinstance(reserved, Reserved)
        changes["pulled"] = reserved.pulled
        assert await mesh.run(reserved, sampling=params, **changes) == Accepted(handoff_id=handoff)
    outcome = await _outcome(mesh, set(sampling), "decode-0", num_delivered_tokens)
    for handoff in sampling:
        await mesh.release("prefill", "prefill-0", handoff)
    return outcome


async def _listen(mesh: Mesh, handoffs: set[str], first: int = 0) -> dict[str, Told]:
    """Frames until every handoff has its final one; their indices are those of the request, without a gap or a repeat."""
    told = {handoff: Told() for handoff in handoffs}
    while any(each.final is None for each in told.values()):
        frame = await mesh.frames.get()
        each = told[frame.handoff_id]
        assert each.final is None
        assert frame.index == first + len(each.tokens)
        each.tokens += frame.token_ids
        each.final = frame if frame.final else None
    return told


async def _outcome(mesh: Mesh, handoffs: set[str], worker_id: str, first: int = 0) -> Outcome:
    """Commit what has been computed, and listen until every handoff has ended."""
    worker = mesh.services[worker_id]
    pulls: list[str] = []
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(_listen(mesh, handoffs, first))
        ending = group.create_task(_commit(mesh, len(handoffs), pulls))
    assert await worker.bus.flush_events()
    events = []
    for handoff in handoffs:
        stream = mesh.bus.read_stream(subjects.EVENTS_STREAM, subjects.handoff_events_filter(handoff))
        events += [decode(stored.data, HandoffEvent) async for stored in stream]
    return Outcome(
        told=telling.result(),
        ended=ending.result(),
        events=[(event.event, event.handoff_id) for event in events if event.service == worker.role],
        num_preemptions=_preemptions(worker),
        pulls=pulls,
    )


async def _commit(mesh: Mesh, num_handoffs: int, pulls: list[str]) -> dict[str, RequestEnded]:
    """Commit each handoff whose prompt has been computed, and pulled if decode does that; how they all ended."""
    ended: dict[str, RequestEnded] = {}
    first_tokens: dict[str, int] = {}
    while len(ended) < num_handoffs:
        report = await mesh.heard.get()
        handoff = report.handoff_id
        if isinstance(report, PrefillFinished):
            assert report.first_token is not None
            first_tokens[handoff] = report.first_token
            if report.source is not None:
                assert await mesh.pull(report.source, handoff=handoff) == Accepted(handoff_id=handoff)
                continue
            assert await mesh.commit(report.first_token, handoff) == Accepted(handoff_id=handoff)
        elif isinstance(report, PullEnded):
            assert report.error is None
            pulls.append(handoff)
            assert await mesh.commit(first_tokens[handoff], handoff) == Accepted(handoff_id=handoff)
        elif isinstance(report, RequestEnded):
            ended[report.handoff_id] = report
    return ended


def _preemptions(worker: WorkerService) -> int:
    lines = worker.metrics.exposition().decode().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("pdmesh_worker_preemptions_total ")]
    return int(float(value))
