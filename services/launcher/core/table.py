"""Timelines and events as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.events import EventName, HandoffEvent
from contracts.phases import Phase
from services.launcher.core.timeline import TOKENS_OF, Timeline

_HEAD = ("began at ms", "ms", "bytes", "parts", "phase", "where", "")
_NUM_RIGHT = 4
_DURATIONS = {
    EventName.LAYER_COMPUTED: "compute_ms",
    EventName.PART_PUSHED: "busy_ms",
    EventName.RANK_PUSHED: "busy_ms",
    EventName.PREFILL_FINISHED: "compute_ms",
    EventName.LEDGER_CLOSED: "ledger_ms",
}
_MEANINGS = {
    Phase.PUSH: " (busy)",
    Phase.TAKEOVER_TOTAL: " (commit to first decode step)",
    Phase.TOTAL: " (submit to end)",
}


def render(timeline: Timeline) -> str:
    """The timeline as a table, with the figures that people ask for first below it. No newline at the end."""
    lines = [f"handoff {timeline.handoff_id}: {timeline.route}, {timeline.outcome}"]
    if timeline.trace_id:
        lines.append(f"  trace {timeline.trace_id}")
    cells = [_HEAD]
    for row in timeline.rows:
        moment = (f"{row.at_ms:.1f}", _number(row.duration_ms))
        carried = (_count(row.num_bytes), _count(row.num_parts))
        cells.append((*moment, *carried, row.name, row.who, row.detail))
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    for line in cells:
        padded = [
            cell.rjust(width) if column < _NUM_RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(padded)).rstrip())
    lines += [f"  {name:<11} {value}" for name, value in _figures(timeline)]
    lines += _phase_lines(timeline)
    if timeline.num_missing_parts:
        lines.append(f"  {timeline.num_missing_parts} parts of the cache had not arrived:")
        lines += [f"    {part}" for part in timeline.missing_parts]
        if timeline.num_missing_parts > len(timeline.missing_parts):
            lines.append(f"    and {timeline.num_missing_parts - len(timeline.missing_parts)} more")
    return "\n".join(lines)


def render_event(event: HandoffEvent) -> str:
    """One event on one line, as `pdmesh events` prints it."""
    words = [event.at, event.handoff_id, event.event.value, event.instance or event.service]
    fields = (
        (_DURATIONS.get(event.event, "duration_ms"), _number(event.duration_ms)),
        ("prepare_ms", _number(event.prepare_ms)),
        ("rpc_ms", _number(event.rpc_ms)),
        ("enqueue_ms", _number(event.enqueue_ms)),
        ("total_ms", _number(event.total_ms)),
        ("bytes", _count(event.num_bytes)),
        ("parts", _count(event.num_parts)),
        (f"{TOKENS_OF.get(event.event, 'all')}_tokens", _count(event.num_tokens)),
        ("steps", _count(event.num_steps)),
        ("drafted", _count(event.num_drafted)),
        ("accepted", _count(event.num_accepted)),
        ("accepted_at", ",".join(map(str, event.accepted_at))),
        ("layer", _count(event.layer)),
        ("namespace", event.namespace or ""),
        ("role", event.role or ""),
        ("source_rank", _count(event.source_rank)),
        ("destination_rank", _count(event.destination_rank)),
        ("source_dp_rank", _count(event.source_dp_rank or None)),
        ("destination_dp_rank", _count(event.destination_dp_rank or None)),
        ("finish_reason", event.finish_reason or ""),
        ("quarantined", "1" if event.quarantined else ""),
        ("error", f"{event.error.code}: {event.error.message}" if event.error else ""),
    )
    return "  ".join([*words, *(f"{name}={value}" for name, value in fields if value)])


def _phase_lines(timeline: Timeline) -> list[str]:
    """What was measured of each phase, one line a phase."""
    if not timeline.phases:
        return []
    named = [
        (phase + _MEANINGS.get(phase, "") + ("" if rank is None else f", rank {rank}"), f"{value:,.2f}")
        for phase, rank, value in timeline.phases
    ]
    left, right = (max(len(words[column]) for words in named) for column in (0, 1))
    return ["  phases in ms", *(f"    {name:<{left}}  {value:>{right}}" for name, value in named)]


def _figures(timeline: Timeline) -> Sequence[tuple[str, str]]:
    figures = [("moved", f"{timeline.num_bytes:,} bytes in {timeline.num_parts:,} parts")]
    if timeline.overlap is not None:
        figures.append(("overlap", f"{timeline.overlap:.0%} of the push time lay before prefill's compute ended"))
    if timeline.gap_ms is not None:
        figures.append(("handoff gap", f"{timeline.gap_ms:.1f} ms from the last cache byte to the first decode step"))
    if timeline.total_ms is not None and not any(phase is Phase.TOTAL for phase, _, _ in timeline.phases):
        figures.append(("total", f"{timeline.total_ms:.1f} ms"))
    return figures


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
