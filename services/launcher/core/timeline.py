"""A handoff's timeline, computed from its events alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec

from contracts.events import EventName, HandoffEvent
from contracts.phases import Phase, phases_of

_FOLDED: Final = frozenset({EventName.LAYER_COMPUTED, EventName.PART_PUSHED})
_ENDS: Final = (EventName.REQUEST_FINISHED, EventName.REQUEST_CANCELLED, EventName.REQUEST_FAILED)
_ORDER: Final = {name: place for place, name in enumerate(EventName)}
_NO_SPAN: Final = frozenset({EventName.RANK_PUSHED, *_ENDS})
"""What is told at one moment: a rank's busy time has gaps, and the whole request is no phase."""
_SAME_CLOCK_NS: Final = 1_000_000_000
_MS: Final = 1_000_000
_PREPARE: Final = {EventName.PREFILL_STARTED: "queue", EventName.PREFILL_FINISHED: "queue"}
_TOTAL: Final = {
    EventName.PREFILL_FINISHED: "queue and compute",
    EventName.REQUEST_UNLOCKED: "pull",
    EventName.TAKEN_OVER: "commit to first decode step",
}
_SHARDS: Final = frozenset({EventName.SHARD_PULL_STARTED, EventName.SHARD_PULLED})
_PULLED: Final = frozenset({EventName.SHARD_PULLED, EventName.SHARDS_MERGED})
TOKENS_OF: Final = {
    EventName.REQUEST_SUBMITTED: "prompt",
    EventName.DECODE_RESERVED: "cached",
    EventName.PREFILL_STARTED: "prompt",
    EventName.PREFILL_FINISHED: "computed",
    **dict.fromkeys(_ENDS, "output"),
}
"""What the tokens are that an event counts."""
BROKER: Final = "broker"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One phase. It began `at_ms` after the timeline's begin and ended `duration_ms` later; a moment has no duration.

    A row that sums up many events goes from the begin of the earliest of them to the end of the last.
    """

    at_ms: float
    name: str
    who: str
    duration_ms: float | None = None
    num_bytes: int | None = None
    num_parts: int | None = None
    detail: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff. What cannot be known from the events that are there is None.

    `overlap` is the share of the time spent on pushing parts that lay before the last layer was computed.
    `gap_ms`, the handoff gap, runs from the end of the last push, pull or merge to the decode worker's first step.
    `total_ms` runs from the first begin of anything to the end of the request. `phases` are those that the broker measured, in the order
    of `contracts.phases`, with the source rank of a push. `missing_parts` are named as far as the event names them.
    """

    handoff_id: str
    request_id: str
    trace_id: str
    route: str
    outcome: str
    rows: tuple[Row, ...]
    num_bytes: int
    num_parts: int
    overlap: float | None
    gap_ms: float | None
    total_ms: float | None
    phases: tuple[tuple[Phase, int | None, float], ...] = ()
    missing_parts: tuple[str, ...] = ()
    num_missing_parts: int = 0


def is_finished(events: Iterable[HandoffEvent]) -> bool:
    """Whether the request of these events has ended, well or not."""
    return any(event.event in _ENDS for event in events)


def tells_all(events: Sequence[HandoffEvent]) -> bool:
    """Whether nothing more will be told of a handoff: it has ended, its memory is back, and so is the word of each part."""
    names = {event.event for event in events}
    if not is_finished(events):
        return False
    if any(event.mixed_worker is not None for event in events):
        return EventName.DECODE_RELEASED in names
    parts = sum(event.event is EventName.PART_PUSHED for event in events)
    parts += sum(event.num_parts or 0 for event in events if event.event is EventName.REQUEST_UNLOCKED)
    owed = next((event.num_parts or 0 for event in events if event.event is EventName.LEDGER_CLOSED), 0)
    return {EventName.DECODE_RELEASED, EventName.PREFILL_RELEASED} <= names and parts >= owed


def by_handoff(events: Iterable[HandoffEvent]) -> dict[str, list[HandoffEvent]]:
    """The events of each handoff; handoffs in the order in which they are first spoken of."""
    found: dict[str, list[HandoffEvent]] = {}
    for event in events:
        found.setdefault(event.handoff_id, []).append(event)
    return found


def build(events: Sequence[HandoffEvent]) -> Timeline:
    """The timeline of the one handoff that all `events` are about; they may be in any order and repeated.

    Raises ValueError without events, or when they are about several handoffs.
    """
    handoffs = {event.handoff_id for event in events}
    if len(handoffs) != 1:
        raise ValueError(f"a timeline is of one handoff; these events are about {len(handoffs)}")
    times = _times(list(dict.fromkeys(events)))
    ordered = sorted(times, key=lambda event: (times[event], _ORDER[event.event]))
    pushes = [event for event in ordered if event.event is EventName.PART_PUSHED]
    layers = [event for event in ordered if event.event is EventName.LAYER_COMPUTED]
    starts = _starts(times)
    origin = min(starts.values())
    pushed_ranks = {event.source_rank for event in pushes}
    pulled = {_shard(event) for event in ordered if event.event is EventName.SHARD_PULLED}
    rows = [
        _row(event, (starts[event] - origin) / _MS)
        for event in ordered
        if event.event not in _FOLDED
        and not (event.event is EventName.RANK_PUSHED and event.source_rank in pushed_ranks)
        and not (event.event is EventName.SHARD_PULL_STARTED and _shard(event) in pulled)
    ]
    if layers:
        rows.append(_computed(layers, starts, times, origin))
    rows += _pushed(pushes, starts, times, origin)
    ends = [event for event in ordered if event.event in _ENDS]
    carried = pushes or [event for event in ordered if event.event is EventName.RANK_PUSHED]
    carried += [event for event in ordered if event.event is EventName.REQUEST_UNLOCKED]
    return Timeline(
        handoff_id=ordered[0].handoff_id,
        request_id=ordered[0].request_id,
        trace_id=next((event.trace_id for event in ordered if event.trace_id), ""),
        route=_route(ordered),
        outcome=_outcome(ends),
        rows=tuple(sorted(rows, key=lambda row: row.at_ms)),
        num_bytes=sum(event.num_bytes or 0 for event in carried),
        num_parts=sum(1 if event.num_parts is None else event.num_parts for event in carried),
        overlap=_overlap(pushes, times, _compute_end(ordered, times)),
        gap_ms=_gap(ordered, [*pushes, *(event for event in ordered if event.event in _PULLED)], times),
        total_ms=(times[ends[-1]] - origin) / _MS if ends else None,
        phases=_phases(ordered),
        missing_parts=ends[-1].missing_parts if ends else (),
        num_missing_parts=(ends[-1].num_missing_parts or 0) if ends else 0,
    )


def _phases(events: Sequence[HandoffEvent]) -> tuple[tuple[Phase, int | None, float], ...]:
    """Each phase once, and a push once a source rank. A worker's own events tell of some of them, too: the broker's count."""
    order = {phase: place for place, phase in enumerate(Phase)}
    found: dict[tuple[Phase, int | None], float] = {}
    for event in sorted(events, key=lambda event: event.service == BROKER):
        for phase, value in phases_of(event):
            found[phase, event.source_rank] = value
    ranked = sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1] or 0))
    return tuple((phase, rank, value) for (phase, rank), value in ranked)


def _times(events: list[HandoffEvent]) -> dict[HandoffEvent, int]:
    """When what each event tells of had ended, in ns on one scale: the host's clock, or the wall's where processes do not share a host."""
    offsets: dict[tuple[str, str], int] = {}
    for event in events:
        offsets.setdefault((event.service, event.instance), _wall_ns(event) - event.at_ns)
    if max(offsets.values()) - min(offsets.values()) <= _SAME_CLOCK_NS:
        return {event: _moment_ns(event) for event in events}
    return {event: event.at_ns + offsets[event.service, event.instance] for event in events}


def _moment_ns(event: HandoffEvent) -> int:
    """When it had ended: of a takeover the begin of the first decode step, of which the broker tells a little later."""
    if event.event is EventName.TAKEN_OVER and event.started_ns is not None:
        return event.started_ns
    return event.at_ns


def _starts(times: dict[HandoffEvent, int]) -> dict[HandoffEvent, int]:
    """When each thing began that took the time which its row shows; of a moment, the moment.

    The compute of a prompt began when its worker said so: a layer's event tells of its last chunk alone, and the end of a
    prefill is told later than it was.
    """
    begun = [time for event, time in times.items() if event.event is EventName.PREFILL_STARTED]
    starts = {event: time - _length_ns(event) for event, time in times.items()}
    for event, start in starts.items():
        if begun and event.event is EventName.PREFILL_FINISHED:
            starts[event] = min(begun)
        elif event.event is EventName.LAYER_COMPUTED:
            starts[event] = min(start, *begun) if begun else start
    return starts


def _wall_ns(event: HandoffEvent) -> int:
    return round(datetime.fromisoformat(event.at).timestamp() * 1e9)


def _busy_ns(event: HandoffEvent) -> int:
    """How long it took. A part pushed in several pieces is busy for less than the time from its first start to its end."""
    if event.duration_ms is not None:
        return round(event.duration_ms * _MS)
    return 0 if event.started_ns is None else event.at_ns - event.started_ns


def _length_ns(event: HandoffEvent) -> int:
    """From its first start to its end. An event that tells neither is a moment."""
    if event.event in _FOLDED:
        return _busy_ns(event) if event.started_ns is None else event.at_ns - event.started_ns
    return round((_shown_ms(event) or 0.0) * _MS)


def _shown_ms(event: HandoffEvent) -> float | None:
    """The one duration that stands for the phase: what ended when the event's thing had ended."""
    if event.event in _NO_SPAN:
        return None
    return next((ms for ms in (event.duration_ms, event.rpc_ms, event.total_ms) if ms is not None), None)


def _row(event: HandoffEvent, at_ms: float) -> Row:
    return Row(
        at_ms=at_ms,
        name=event.event.value.replace("_", " "),
        who=event.instance or event.service,
        duration_ms=_shown_ms(event),
        num_bytes=event.num_bytes,
        num_parts=event.num_parts,
        detail=_detail(event),
    )


def _detail(event: HandoffEvent) -> str:
    spans = (
        (_PREPARE.get(event.event, "prepare"), event.prepare_ms),
        ("rpc", event.rpc_ms),
        ("enqueue", event.enqueue_ms),
        ("read", event.wait_ms if event.event is EventName.REQUEST_UNLOCKED else None),
        ("merge", event.merge_ms if event.event is EventName.REQUEST_UNLOCKED else None),
        (_TOTAL.get(event.event, "since the submit"), event.total_ms),
        ("busy", event.duration_ms if event.event is EventName.RANK_PUSHED else None),
    )
    words = [f"{name} {value:.1f} ms" for name, value in spans if value is not None]
    if event.source_rank is not None:
        to = f" to {event.destination_rank}" if event.event in _SHARDS else ""
        words.append(f"rank {event.source_rank}{to}")
    if event.event is EventName.SHARDS_MERGED and event.role is not None:
        words.append(event.role)
    if event.parallel is not None:
        words.append("side by side" if event.parallel else "one by one")
    if event.shard_state is not None:
        words.append(event.shard_state)
    if event.source_dp_rank or event.destination_dp_rank:
        words.append(f"replica {event.source_dp_rank or event.destination_dp_rank}")
    if event.num_tokens is not None:
        words.append(f"{event.num_tokens} {TOKENS_OF.get(event.event, '')} tokens")
    if event.num_drafted is not None:
        places = f" ({', '.join(map(str, event.accepted_at))} by place)" if len(event.accepted_at) > 1 else ""
        words.append(f"{event.num_steps} steps, {event.num_accepted} of {event.num_drafted} guesses right{places}")
    if event.draft_ms is not None and event.verify_ms is not None:
        words.append(f"guessing {event.draft_ms:.1f} ms, verifying {event.verify_ms:.1f} ms")
    if event.quarantined:
        words.append("memory in quarantine")
    if event.finish_reason is not None:
        words.append(event.finish_reason)
    if event.error is not None:
        words.append(f"{event.error.code}: {event.error.message}")
    return ", ".join(words)


def _shard(event: HandoffEvent) -> tuple[int | None, int | None, int | None]:
    """Which pull of which shard an event is about."""
    return event.lock, event.source_rank, event.destination_rank


def _computed(
    layers: Sequence[HandoffEvent], starts: dict[HandoffEvent, int], times: dict[HandoffEvent, int], origin: int
) -> Row:
    """One row for all ranks: they compute in lockstep, and a step ends for all of them at once."""
    first, last = min(starts[event] for event in layers), max(times[event] for event in layers)
    ranks = len({event.source_rank for event in layers})
    return Row(
        at_ms=(first - origin) / _MS,
        name="compute",
        who=layers[0].instance or layers[0].service,
        duration_ms=(last - first) / _MS,
        detail=f"{len({event.layer for event in layers})} layers on {ranks} rank{'s' if ranks > 1 else ''}",
    )


def _pushed(
    pushes: Sequence[HandoffEvent], starts: dict[HandoffEvent, int], times: dict[HandoffEvent, int], origin: int
) -> list[Row]:
    """One row for each source rank: from the first start to the last end, how much of it was busy, what each role carried."""
    ranks: dict[int, list[HandoffEvent]] = defaultdict(list)
    for event in pushes:
        ranks[-1 if event.source_rank is None else event.source_rank].append(event)
    rows = []
    for rank, own in sorted(ranks.items()):
        first, last = min(starts[event] for event in own), max(times[event] for event in own)
        busy_ms = sum(_busy_ns(event) for event in own) / _MS
        rows.append(
            Row(
                at_ms=(first - origin) / _MS,
                name="push" if rank < 0 else f"push, rank {rank}",
                who=own[0].instance or own[0].service,
                duration_ms=(last - first) / _MS,
                num_bytes=sum(event.num_bytes or 0 for event in own),
                num_parts=sum(1 if event.num_parts is None else event.num_parts for event in own),
                detail=f"busy {busy_ms:.1f} ms of it: {_roles(own)}",
            )
        )
    return rows


def _roles(pushes: Sequence[HandoffEvent]) -> str:
    sums: dict[str, int] = defaultdict(int)
    for event in pushes:
        name = event.role or "cache"
        sums[f"{event.namespace} {name}" if event.namespace else name] += event.num_bytes or 0
    return ", ".join(f"{role} {total:,}" for role, total in sorted(sums.items()))


def _route(events: Sequence[HandoffEvent]) -> str:
    def named(field: str) -> str | None:
        return next((value for event in events if (value := getattr(event, field)) is not None), None)

    mixed = named("mixed_worker")
    return mixed or f"{named('prefill_worker') or '?'} -> {named('decode_worker') or '?'}"


def _outcome(ends: Sequence[HandoffEvent]) -> str:
    if not ends:
        return "not finished"
    last = ends[-1]
    verdict = last.event.value.removeprefix("request_")
    reason = last.finish_reason or (last.error.code.value if last.error else "")
    return f"{verdict} ({reason})" if reason else verdict


def _compute_end(events: Sequence[HandoffEvent], times: dict[HandoffEvent, int]) -> int | None:
    layers = [times[event] for event in events if event.event is EventName.LAYER_COMPUTED]
    if layers:
        return max(layers)
    return min((times[event] for event in events if event.event is EventName.PREFILL_FINISHED), default=None)


def _overlap(pushes: Sequence[HandoffEvent], times: dict[HandoffEvent, int], compute_end: int | None) -> float | None:
    """What of the push time lay after the end of the compute was not hidden. Of a part in several copies only the last can be late."""
    whole = sum(_busy_ns(event) for event in pushes)
    if compute_end is None or whole <= 0:
        return None
    late = sum(min(_last_copy_ns(event), max(0, times[event] - compute_end)) for event in pushes)
    return 1 - late / whole


def _last_copy_ns(event: HandoffEvent) -> int:
    return _busy_ns(event) if event.last_started_ns is None else event.at_ns - event.last_started_ns


def _gap(events: Sequence[HandoffEvent], moves: Sequence[HandoffEvent], times: dict[HandoffEvent, int]) -> float | None:
    told = [times[event] for event in events if event.event is EventName.TAKEN_OVER]
    if not told or not moves:
        return None
    return (min(told) - max(times[event] for event in moves)) / _MS
