"""Handoffs at some point of their life, one step after the other."""

from __future__ import annotations

from typing import Any, TypeVar

from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import Grant, HandoffRecord, HandoffState, PartDone, PartsReport, PrefillFinished, Reserved
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from contracts.requests import DisaggregatedRoute, SamplingParams, SubmitRequest, WorkerRef
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import adopt, begin, step

PREFILL = WorkerRef(worker_id="p0", incarnation="ip")
DECODE = WorkerRef(worker_id="d0", incarnation="id")
GRANT = Grant(worker_id="d0", incarnation="id", generation=3, block_ids=(0, 1, 2), slot=1)
POLICY = Policy(fence=4, tombstone_margin_ms=2_000, parts_query_ms=50)
SECOND = 1_000_000_000
SECRET = "feedfacefeedfacefeedfacefeedface"
SOURCE = Grant(worker_id="p0", incarnation="ip", generation=9, block_ids=(7, 8), slot=2, secret=SECRET)
KEY = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=0, dst_rank=0)
STATE = PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=1, src_rank=0, dst_rank=0)

Effects = tuple[fx.Effect, ...]
E = TypeVar("E")


def submitted(*planned: PlannedPart, delivered: int = 0, router_incarnation: str | None = "ir") -> ev.Submitted:
    """A submit at 1 s, to end by 11 s."""
    return ev.Submitted(
        at_ns=SECOND,
        submit=SubmitRequest(
            handoff_id="r1-0",
            request_id="r1",
            attempt=0,
            router_id="router-0",
            route=DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
            num_prompt_tokens=40,
            prompt_hash="h",
            sampling=SamplingParams(max_tokens=8, seed=1),
            timeout_ms=10_000,
            num_delivered_tokens=delivered,
            router_incarnation=router_incarnation,
        ),
        deadline_ns=11 * SECOND,
        deadline_at="2030-01-01T00:00:10+00:00",
        planned=planned or (KEY,),
        block_size=16,
    )


def reserving(*planned: PlannedPart, delivered: int = 0, router_incarnation: str | None = "ir") -> Handoff:
    """A handoff whose record is stored, with the reserve under way."""
    handoff, _ = begin(submitted(*planned, delivered=delivered, router_incarnation=router_incarnation), POLICY)
    handoff, _ = step(handoff, ev.RecordStored(at_ns=SECOND, write=1, revision=1))
    return handoff


def reserved(handoff: Handoff, *, grant: Grant = GRANT, cached: int = 16, **says: Any) -> tuple[Handoff, Effects]:
    """The step in which decode's answer arrives, at 3 s."""
    answer = Reserved(handoff_id="r1-0", grant=grant, num_cached_tokens=cached, prepare_ms=0.5, **says)
    return step(handoff, ev.DecodeReserved(at_ns=3 * SECOND, answer=answer, rpc_ms=1.0))


def finished(handoff: Handoff, **says: Any) -> tuple[Handoff, Effects]:
    """The step in which prefill's end arrives, at 4 s, with a first token unless told otherwise."""
    values: dict[str, Any] = {"incarnation": "ip", "first_token": 5}
    message = PrefillFinished(handoff_id="r1-0", **(values | says))
    return step(handoff, ev.PrefillEnded(at_ns=4 * SECOND, message=message))


def stored(handoff: Handoff) -> tuple[Handoff, Effects]:
    """The bucket takes the write that is under way."""
    assert handoff.writing is not None
    revision = handoff.revision + 1
    return step(handoff, ev.RecordStored(at_ns=4 * SECOND, write=handoff.num_writes, revision=revision))


def report(*parts: PlannedPart, transfer: Transfer = Transfer.PUSH, **says: Any) -> ev.PartsReported:
    """Everything of these parts has arrived: 24 tokens behind 16 cached ones, or a state."""
    values: dict[str, Any] = {"source_rank": 0, "revision": 1, "num_bytes": 100, "push_ms": 1.0}
    values["incarnation"] = "id" if transfer is Transfer.PULL else "ip"
    done = tuple(
        PartDone(
            namespace=part.namespace,
            role=part.role,
            layer=part.layer,
            destination_rank=part.dst_rank,
            ranges=((0, 1) if part.role is Role.SSM else (16, 40),),
        )
        for part in parts
    )
    message = PartsReport(handoff_id="r1-0", parts=done, transfer=transfer, **(values | says))
    return ev.PartsReported(at_ns=4 * SECOND, report=message)


def record(state: HandoffState, **says: Any) -> HandoffRecord:
    """What an earlier broker left."""
    values: dict[str, Any] = {"route": DisaggregatedRoute(prefill=PREFILL, decode=DECODE)}
    if state is not HandoffState.RESERVING:
        values |= {"grant": GRANT, "num_cached_tokens": 16}
    if state not in {HandoffState.RESERVING, HandoffState.PREFILLING}:
        values |= {"first_token": 9, "num_prefill_cached_tokens": 24}
    return HandoffRecord(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        state=state,
        fence=3,
        num_prompt_tokens=40,
        prompt_hash="h",
        sampling=SamplingParams(max_tokens=8, seed=1),
        deadline_at="2030-01-01T00:00:10+00:00",
        **(values | says),
    )


def adopting(state: HandoffState, **says: Any) -> tuple[Handoff, Effects]:
    """The first step of a new broker, at 1 s; the submit was at 0."""
    event = ev.Adopted(at_ns=SECOND, record=record(state, **says), revision=8, deadline_ns=11 * SECOND, begun_ns=0)
    return adopt(event, POLICY)


def adopted(state: HandoffState, **says: Any) -> tuple[Handoff, Effects]:
    """The first steps of a new broker, whose term the bucket takes."""
    handoff, effects = adopting(state, **says)
    handoff, more = stored(handoff)
    return handoff, effects + more


def of(effects: Effects, kind: type[E]) -> list[E]:
    """The effects of one kind, in order."""
    return [effect for effect in effects if isinstance(effect, kind)]


def names_of(effects: Effects) -> list[EventName]:
    """The events that were published, in order."""
    return [effect.name for effect in of(effects, fx.Publish)]


def code_of(handoff: Handoff) -> ErrorCode | None:
    """The error with which it is about to end."""
    error = None if handoff.verdict is None else handoff.verdict.error
    return None if error is None else error.code
