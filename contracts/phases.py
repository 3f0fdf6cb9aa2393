"""The phases of a handoff that people measure, and which field of which of the broker's events tells how long each took.

A mixed worker tells of its prompts in events of its own, and of the same figures when it gives a request up: `phases_of_prompt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from contracts.events import EventName, HandoffEvent
from contracts.handoff import PromptTimes


class Phase(StrEnum):
    """A phase, in the order in which phases begin. Some overlap; none but TOTAL and RELEASE_RPC outlasts the request."""

    RESERVE_PREPARE = "reserve_prepare"
    """Decode sets memory aside, on all of its ranks."""
    RESERVE_RPC = "reserve_rpc"
    """The broker asks decode for it, to the answer."""
    RUN_RPC = "run_rpc"
    """The broker gives prefill the prompt to compute, with the places to write to, to the answer."""
    PREFILL_QUEUE = "prefill_queue"
    """The prompt waits for memory at the worker that computes it."""
    PREFILL_COMPUTE = "prefill_compute"
    """From then to the first token."""
    PUSH = "push"
    """What one source rank was busy with copying cache, all of its parts together. Once for each source rank."""
    RESPONSE_PREPARE = "response_prepare"
    """Prefill has the first token; to the moment at which its report to the broker is ready to be sent."""
    LOCK = "lock"
    """The request's lock is held: decode may pull its cache."""
    PULL_WAIT = "pull_wait"
    """Decode reads: from the beginning of the first shard to the end of the last."""
    PULL_MERGE = "pull_merge"
    """Then it merges the states of each role into their places, on the slowest rank, all roles together."""
    PULL_TOTAL = "pull_total"
    """From the order to pull until everything was in its place, by decode's clock."""
    LEDGER = "ledger"
    """From the broker's question to prefill until every planned byte was accounted for."""
    RESPONSE_RPC = "response_rpc"
    """Prefill reports the first token to the broker, to the answer."""
    COMMIT_RPC = "commit_rpc"
    """The broker gives the request to decode, to the answer."""
    FIRST_TOKEN_PREPARE = "first_token_prepare"  # noqa: S105 - a token of text
    """Decode has the commit; to the moment at which the first token is ready to be sent."""
    FIRST_TOKEN_RPC = "first_token_rpc"  # noqa: S105 - a token of text
    """Decode sends the first token, until the bus has taken it."""
    TAKEOVER_PREPARE = "takeover_prepare"
    """Decode has the commit, until the sequence can take part in steps."""
    TAKEOVER_ENQUEUE = "takeover_enqueue"
    """From then to the beginning of its first step."""
    TAKEOVER_TOTAL = "takeover_total"
    """Both together."""
    RELEASE_RPC = "release_rpc"
    """The broker takes prefill's memory back, to the answer."""
    TOTAL = "total"
    """From the submit to the end."""


PULL_PHASES: Final = frozenset({Phase.LOCK, Phase.PULL_WAIT, Phase.PULL_MERGE, Phase.PULL_TOTAL})
"""Phases that only a handoff has whose decode worker pulls; the others have `PUSH`, unless everything is pulled."""

_FIELDS: Final[dict[EventName, tuple[tuple[str, Phase], ...]]] = {
    EventName.DECODE_RESERVED: (("prepare_ms", Phase.RESERVE_PREPARE), ("rpc_ms", Phase.RESERVE_RPC)),
    EventName.PREFILL_ACCEPTED: (("rpc_ms", Phase.RUN_RPC),),
    EventName.PREFILL_FINISHED: (
        ("prepare_ms", Phase.PREFILL_QUEUE),
        ("duration_ms", Phase.PREFILL_COMPUTE),
        ("response_prepare_ms", Phase.RESPONSE_PREPARE),
    ),
    EventName.RANK_PUSHED: (("duration_ms", Phase.PUSH),),
    EventName.REQUEST_UNLOCKED: (
        ("duration_ms", Phase.LOCK),
        ("wait_ms", Phase.PULL_WAIT),
        ("merge_ms", Phase.PULL_MERGE),
        ("total_ms", Phase.PULL_TOTAL),
    ),
    EventName.LEDGER_CLOSED: (("duration_ms", Phase.LEDGER),),
    EventName.HANDOFF_COMMITTED: (("rpc_ms", Phase.COMMIT_RPC),),
    EventName.TAKEN_OVER: (
        ("first_token_prepare_ms", Phase.FIRST_TOKEN_PREPARE),
        ("first_token_rpc_ms", Phase.FIRST_TOKEN_RPC),
        ("prepare_ms", Phase.TAKEOVER_PREPARE),
        ("enqueue_ms", Phase.TAKEOVER_ENQUEUE),
        ("total_ms", Phase.TAKEOVER_TOTAL),
    ),
    EventName.PREFILL_RELEASED: (("response_rpc_ms", Phase.RESPONSE_RPC), ("rpc_ms", Phase.RELEASE_RPC)),
    EventName.REQUEST_FINISHED: (("total_ms", Phase.TOTAL),),
    EventName.REQUEST_CANCELLED: (("total_ms", Phase.TOTAL),),
    EventName.REQUEST_FAILED: (("total_ms", Phase.TOTAL),),
}

PHASE_FIELDS: Final = tuple((name, field, phase) for name, fields in _FIELDS.items() for field, phase in fields)
"""Each phase with the event and the field that tell it."""


def phases_of(event: HandoffEvent) -> Iterator[tuple[Phase, float]]:
    """The phases that an event tells of, with their duration in ms."""
    for field, phase in _FIELDS.get(event.event, ()):
        value = getattr(event, field)
        if value is not None:
            yield phase, value


def phases_of_prompt(times: PromptTimes) -> Iterator[tuple[Phase, float]]:
    """The phases that a mixed worker has measured, with their duration in ms."""
    yield Phase.PREFILL_QUEUE, times.queue_ms
    yield Phase.PREFILL_COMPUTE, times.compute_ms
