"""How every prefill worker stands with every decode worker, as a table for people, and link events as lines."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.links import LinkEvent, LinkRecord, LinkState
from contracts.workers import WorkerRecord, WorkerRole, WorkerState

_HEAD = (
    "prefill",
    "decode",
    "state",
    "since",
    "topology",
    "transport",
    "drafts",
    "parts",
    "bytes/token",
    "state bytes",
)
_NUM_LEFT = 7


def render_links(links: Sequence[LinkRecord], workers: Sequence[WorkerRecord]) -> str:
    """The table, with the reason below each pair that is not linked, or leaves a draft's cache behind. No newline at the end.

    A pair of workers that live and have no record of these two starts is told of as well: it has not met.
    """
    alive = {worker.worker_id: worker for worker in workers}
    told = {(link.prefill.worker_id, link.decode.worker_id): link for link in links}
    pairs = {
        (prefill.worker_id, decode.worker_id)
        for prefill in workers
        for decode in workers
        if prefill.role is WorkerRole.PREFILL and decode.role is WorkerRole.DECODE
    }
    rows = [_row(pair, told.get(pair), alive) for pair in sorted(pairs | told.keys())]
    widths = [
        max(len(cells[column]) for cells in (_HEAD, *(cells for cells, _ in rows))) for column in range(len(_HEAD))
    ]
    lines = [_line(_HEAD, widths)]
    for cells, reason in rows:
        lines.append(_line(cells, widths))
        lines += [f"    {reason}"] if reason else []
    return "\n".join(lines)


def render_link_event(event: LinkEvent) -> str:
    """One event on one line, as `pdmesh events` prints it."""
    words = [event.at, f"{event.prefill.worker_id} -> {event.decode.worker_id}", event.event.value, event.instance]
    fields = (
        ("topology", event.topology),
        ("transport", event.transport),
        ("parts", f"{event.num_parts:,}" if event.num_parts else ""),
        ("drafts", "yes" if event.has_drafts else ""),
        ("no_drafts", event.why_no_drafts),
        ("rule", event.rule),
        ("reason", event.reason),
    )
    return "  ".join([*words, *(f"{name}={value}" for name, value in fields if value)])


def _row(pair: tuple[str, str], link: LinkRecord | None, alive: dict[str, WorkerRecord]) -> tuple[tuple[str, ...], str]:
    """The cells of a pair, and why it is not linked."""
    gone = [worker_id for worker_id in pair if worker_id not in alive]
    if link is None or (not gone and not _is_about(link, alive)):
        drains = [worker_id for worker_id in pair if alive[worker_id].state is WorkerState.DRAINING]
        why = (
            f"{' and '.join(drains)} drains"
            if drains
            else "the prefill worker has not met this start of the decode worker"
        )
        return (*pair, "none", *[""] * (len(_HEAD) - 3)), why
    reason = link.reason
    if gone:
        reason = "; ".join([*(f"{worker_id} is gone" for worker_id in gone), *([reason] if reason else [])])
    elif link.state is LinkState.MEETING and link.num_failures:
        reason = f"{link.num_failures} tries failed: {reason}"
    if link.why_no_drafts:
        reason = "; ".join([*([reason] if reason else []), f"no drafts come along: {link.why_no_drafts}"])
    figures = (_count(link.num_parts), _count(link.token_bytes), _count(link.state_bytes))
    drafts = ("yes" if link.has_drafts else "no") if link.num_parts else ""
    return (*pair, link.state, _second(link.since), link.topology, link.transport, drafts, *figures), reason


def _second(moment: str) -> str:
    """An RFC 3339 moment without its fraction, and with its zone."""
    zone = moment[19:].lstrip(".0123456789")
    return moment[:19] + ("Z" if zone == "+00:00" else zone)


def _is_about(link: LinkRecord, alive: dict[str, WorkerRecord]) -> bool:
    starts = (alive[link.prefill.worker_id].incarnation, alive[link.decode.worker_id].incarnation)
    return (link.prefill.incarnation, link.decode.incarnation) == starts


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column < _NUM_LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _count(value: int) -> str:
    return f"{value:,}" if value else ""
