"""What one handoff's events say of its phases, its bytes and its gap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from contracts.events import EventName, HandoffEvent
from contracts.manifest import Role
from loadtest.client import Sample
from services.launcher.core.timeline import build, tells_all

PUSH_PREFIX: Final = "push, rank "
STATE_ROLES: Final = frozenset({Role.CONV, Role.SSM})
"""What is ready only when the last chunk is computed; keys and values are ready chunk by chunk."""
PHASES: Final = (
    "admission",
    "reserve: prepare",
    "reserve: rpc",
    "run: rpc",
    "queue",
    "compute",
    "ledger close",
    "finish: told",
    "commit: rpc",
    "takeover: prepare",
    "takeover: enqueue",
    "takeover: total",
    "handoff gap",
    "handoff gap: after compute",
)
"""Phases in the order in which they end. Pushes, one a source rank, stand before the close of the ledger."""


class PushTime(msgspec.Struct, frozen=True, kw_only=True):
    """What pushing one part took: `busy_ns` in all, of which its last copy took `last_ns`; `late_ns` of it after the end of compute.

    `last_layer` is whether the part is of the layer that is computed last: what its last copy takes cannot be ready before.
    """

    role: str
    busy_ns: int
    last_ns: int
    late_ns: int
    last_layer: bool


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff, or one request of a mixed worker. `phases` are in ms; what the events do not tell is not in it.

    `gap_ms`, the phase `handoff gap`, runs from the last push's end to the start of the first decode step;
    `after_compute_ms` begins when the prompt's compute has ended as well, since the last push ends before the last token
    is drawn.
    `overlap` is the share of the push time that lay before the last layer was computed.
    """

    handoff_id: str
    submitted_ns: int
    num_prompt_tokens: int
    finished: bool
    phases: dict[str, float]
    num_bytes: int = 0
    num_parts: int = 0
    gap_ms: float | None = None
    after_compute_ms: float | None = None
    overlap: float | None = None
    pushes: tuple[PushTime, ...] = ()


def read_handoffs(events: Iterable[HandoffEvent]) -> list[Handoff]:
    """The handoffs that were submitted among `events`, by the time of their submission."""
    found: dict[str, list[HandoffEvent]] = {}
    for event in events:
        found.setdefault(event.handoff_id, []).append(event)
    read = [_read(own) for own in found.values()]
    return sorted((each for each in read if each is not None), key=lambda each: each.submitted_ns)


def within(handoffs: Sequence[Handoff], samples: Sequence[Sample]) -> list[Handoff]:
    """The handoffs that were submitted while one of `samples` was under way: none of a warm-up, none of other prompts."""
    windows = [(sample.sent_ns, sample.done_ns, sample.num_prompt_tokens) for sample in samples]
    return [
        each
        for each in handoffs
        if any(sent <= each.submitted_ns <= done and each.num_prompt_tokens == length for sent, done, length in windows)
    ]


def with_admission(handoffs: Sequence[Handoff], samples: Sequence[Sample]) -> list[Handoff]:
    """The same, with the time from the client's first byte to the broker's submission where only one sample can be meant."""
    told: list[Handoff] = []
    for each in handoffs:
        own = [sample for sample in samples if sample.sent_ns <= each.submitted_ns <= sample.done_ns]
        if len(own) == 1:
            admission = (each.submitted_ns - own[0].sent_ns) / 1e6
            told.append(msgspec.structs.replace(each, phases={"admission": admission, **each.phases}))
        else:
            told.append(each)
    return told


def _read(events: Sequence[HandoffEvent]) -> Handoff | None:
    by_name = {event.event: event for event in events if event.event is not EventName.PART_PUSHED}
    submitted = by_name.get(EventName.REQUEST_SUBMITTED)
    if submitted is None:
        return None
    pushes = [event for event in events if event.event is EventName.PART_PUSHED]
    phases: dict[str, float] = {}

    def note(phase: str, value: float | None) -> None:
        if value is not None:
            phases[phase] = value

    if (reserved := by_name.get(EventName.DECODE_RESERVED)) is not None:
        note("reserve: prepare", reserved.prepare_ms)
        note("reserve: rpc", reserved.rpc_ms)
    accepted = by_name.get(EventName.PREFILL_ACCEPTED)
    if accepted is not None:
        note("run: rpc", accepted.rpc_ms)
    started, finished = by_name.get(EventName.PREFILL_STARTED), by_name.get(EventName.PREFILL_FINISHED)
    if started is not None:
        note("queue", started.prepare_ms)
    if finished is not None:
        by_clock = None if started is None else (finished.at_ns - started.at_ns) / 1e6
        note("compute", finished.duration_ms if finished.duration_ms is not None else by_clock)
    for event in sorted(events, key=lambda each: each.source_rank or 0):
        if event.event is EventName.RANK_PUSHED:
            note(f"{PUSH_PREFIX}{event.source_rank}", event.duration_ms)
    last_push_ns = max((event.at_ns for event in pushes), default=None)
    computed_ns = max((event.at_ns for event in events if event.event is EventName.LAYER_COMPUTED), default=None)
    if finished is not None and computed_ns is not None:
        note("finish: told", (finished.at_ns - computed_ns) / 1e6)
    if (closed := by_name.get(EventName.LEDGER_CLOSED)) is not None and last_push_ns is not None:
        note("ledger close", (closed.at_ns - last_push_ns) / 1e6)
    if (committed := by_name.get(EventName.HANDOFF_COMMITTED)) is not None:
        note("commit: rpc", committed.rpc_ms)
    if (takeover := by_name.get(EventName.TAKEN_OVER)) is not None:
        note("takeover: prepare", takeover.prepare_ms)
        note("takeover: enqueue", takeover.enqueue_ms)
        note("takeover: total", takeover.total_ms)
    timeline = build(events)
    note("handoff gap", timeline.gap_ms)
    after_compute_ms = None
    if timeline.gap_ms is not None and last_push_ns is not None:
        late_ns = 0 if computed_ns is None else max(0, computed_ns - last_push_ns)
        after_compute_ms = timeline.gap_ms - late_ns / 1e6
    note("handoff gap: after compute", after_compute_ms)
    return Handoff(
        handoff_id=submitted.handoff_id,
        submitted_ns=submitted.at_ns,
        num_prompt_tokens=submitted.num_tokens or 0,
        finished=EventName.REQUEST_FINISHED in by_name and tells_all(events),
        phases=phases,
        num_bytes=timeline.num_bytes,
        num_parts=timeline.num_parts,
        gap_ms=timeline.gap_ms,
        after_compute_ms=after_compute_ms,
        overlap=timeline.overlap,
        pushes=() if computed_ns is None else tuple(_push_times(events, pushes, computed_ns)),
    )


def _push_times(events: Sequence[HandoffEvent], pushes: Iterable[HandoffEvent], computed_ns: int) -> Iterator[PushTime]:
    """All on the clock of the host that the worker's processes share."""
    last = max(event.layer or 0 for event in events if event.event is EventName.LAYER_COMPUTED)
    for event in pushes:
        busy_ns = round((event.duration_ms or 0.0) * 1e6)
        last_ns = busy_ns if event.last_started_ns is None else event.at_ns - event.last_started_ns
        yield PushTime(
            role=event.role or "",
            busy_ns=busy_ns,
            last_ns=last_ns,
            late_ns=min(last_ns, max(0, event.at_ns - computed_ns)),
            last_layer=event.layer == last,
        )


def phase_order(phases: Iterable[str]) -> list[str]:
    """The phases that there are, in the order of a report."""
    present = set(phases)
    close = PHASES.index("ledger close")
    ranks = sorted(phase for phase in present if phase.startswith(PUSH_PREFIX))
    return [phase for phase in (*PHASES[:close], *ranks, *PHASES[close:]) if phase in present]
