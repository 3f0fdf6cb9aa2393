"""The messages that a handoff sends, built from what is known of it."""

from __future__ import annotations

from typing import Any

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    Grant,
    HandoffRecord,
    HandoffState,
    PullHandoff,
    ReleaseHandoff,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.pull import RequestLock
from contracts.requests import SubmitRequest, TokenFrame
from contracts.workers import WorkerRole
from services.broker.core.effects import Publish
from services.broker.core.handoff import Handoff, Verdict


def first_record(
    submit: SubmitRequest, *, fence: int, deadline_at: str, submitted_at: str = "", traceparent: str = ""
) -> HandoffRecord:
    """The record with which a handoff begins."""
    return HandoffRecord(
        handoff_id=submit.handoff_id,
        request_id=submit.request_id,
        attempt=submit.attempt,
        router_id=submit.router_id,
        route=submit.route,
        state=HandoffState.RESERVING,
        fence=fence,
        num_prompt_tokens=submit.num_prompt_tokens,
        prompt_hash=submit.prompt_hash,
        sampling=submit.sampling,
        deadline_at=deadline_at,
        submitted_at=submitted_at,
        traceparent=traceparent,
        router_incarnation=submit.router_incarnation,
        num_delivered_tokens=submit.num_delivered_tokens,
    )


def without_secret(grant: Grant | None) -> Grant | None:
    """The grant as everybody may read it."""
    return grant if grant is None or not grant.secret else msgspec.structs.replace(grant, secret="")


def for_bucket(record: HandoffRecord) -> HandoffRecord:
    """What everybody may read of a record: without the secrets of its grants. Whoever adopts it asks the workers for them."""
    grant, source = without_secret(record.grant), without_secret(record.source)
    if grant is record.grant and source is record.source:
        return record
    return msgspec.structs.replace(record, grant=grant, source=source)


def with_progress(handoff: Handoff) -> HandoffRecord:
    """Its record, with how much of the cache has arrived."""
    if handoff.ledger is None:
        return handoff.record
    return msgspec.structs.replace(handoff.record, progress=handoff.ledger.progress, shards=handoff.ledger.shards)


def terminal_record(handoff: Handoff, verdict: Verdict) -> HandoffRecord:
    """The record as it ends: nobody holds its lock, and what earlier attempts have delivered counts, whoever ends it."""
    record = with_progress(handoff)
    return msgspec.structs.replace(
        record,
        state=verdict.state,
        lock=None,
        error=verdict.error,
        finish_reason=verdict.finish_reason,
        num_tokens=max(verdict.num_tokens, record.num_delivered_tokens),
    )


def reserve(handoff: Handoff, at_ns: int) -> ReserveDecode:
    """Ask decode for the memory of prompt and answer."""
    record, workers = handoff.record, handoff.workers
    return ReserveDecode(
        handoff_id=record.handoff_id,
        request_id=record.request_id,
        attempt=record.attempt,
        router_id=record.router_id,
        incarnation=workers[WorkerRole.DECODE].incarnation,
        source=workers[WorkerRole.PREFILL],
        fence=record.fence,
        num_prompt_tokens=record.num_prompt_tokens,
        sampling=record.sampling,
        timeout_ms=handoff.remaining_ms(at_ns),
        num_delivered_tokens=record.num_delivered_tokens,
    )


def run(handoff: Handoff, at_ns: int) -> RunPrefill | RunMixed:
    """Ask the worker that computes the prompt: with the grant where another one decodes."""
    record = handoff.record
    role = WorkerRole.MIXED if record.grant is None else WorkerRole.PREFILL
    common: dict[str, Any] = {
        "handoff_id": record.handoff_id,
        "request_id": record.request_id,
        "attempt": record.attempt,
        "router_id": record.router_id,
        "incarnation": handoff.workers[role].incarnation,
        "fence": record.fence,
        "num_prompt_tokens": record.num_prompt_tokens,
        "prompt_hash": record.prompt_hash,
        "sampling": record.sampling,
        "timeout_ms": handoff.remaining_ms(at_ns),
        "num_delivered_tokens": record.num_delivered_tokens,
    }
    if record.grant is None:
        return RunMixed(**common)
    return RunPrefill(
        **common,
        grant=record.grant,
        num_cached_tokens=record.num_cached_tokens,
        pulled=record.pulled,
        verify=record.verify,
    )


def pull(handoff: Handoff, source: Grant, lock: RequestLock, at_ns: int) -> PullHandoff:
    """Let decode read what it wanted to, from what prefill lets it read, under the request's lock."""
    return PullHandoff(
        handoff_id=handoff.handoff_id,
        incarnation=lock.holder.incarnation,
        fence=handoff.record.fence,
        lock=lock.number,
        source=source,
        timeout_ms=handoff.remaining_ms(at_ns),
    )


def commit(handoff: Handoff, first_token: int, at_ns: int) -> CommitHandoff:
    """Give the request to decode. Its cached tokens are prefill's: decode knows its own. Digests go where decode verifies."""
    return CommitHandoff(
        handoff_id=handoff.handoff_id,
        incarnation=handoff.workers[WorkerRole.DECODE].incarnation,
        fence=handoff.record.fence,
        first_token=first_token,
        num_cached_tokens=handoff.record.num_prefill_cached_tokens,
        timeout_ms=handoff.remaining_ms(at_ns),
        digests=handoff.finished.digests if handoff.record.verify and handoff.finished is not None else (),
        drafts=handoff.record.drafts,
    )


def release(handoff: Handoff, reason: str, at_ns: int) -> ReleaseHandoff:
    """Take the memory back, and turn away what comes late."""
    tombstone_ms = handoff.remaining_ms(at_ns) + handoff.policy.tombstone_margin_ms
    return ReleaseHandoff(handoff_id=handoff.handoff_id, reason=reason, tombstone_ms=tombstone_ms)


def final_frame(handoff: Handoff) -> TokenFrame:
    """The end of a stream as the broker knows it: the tokens themselves are with the worker."""
    record = handoff.record
    return TokenFrame(
        handoff_id=record.handoff_id,
        request_id=record.request_id,
        attempt=record.attempt,
        index=record.num_tokens,
        final=True,
        num_tokens=record.num_tokens,
        finish_reason=record.finish_reason,
        error=record.error,
    )


def happened(handoff: Handoff, name: EventName, at_ns: int, fields: dict[str, Any]) -> Publish:
    """An event for people about this handoff."""
    workers = {f"{role}_worker": worker.worker_id for role, worker in handoff.workers.items()}
    told = {key: value for key, value in fields.items() if value is not None}
    return Publish(name=name, at_ns=at_ns, fields={"phase": str(handoff.state), **workers, **told})


def protocol(text: str) -> ErrorInfo:
    """Somebody broke the protocol: that fails the handoff, not the broker."""
    return ErrorInfo(code=ErrorCode.PROTOCOL, message=text)
