"""One handoff as its broker knows it, for people: who owns what, what has arrived, who may still hold something. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from contracts.handoff import Grant, HandoffRecord
from contracts.pull import ShardPull
from contracts.requests import DisaggregatedRoute, MixedRoute, WorkerRef
from contracts.show import HandoffView, PartView

_MAX_RANGES = 4


def render_handoff(view: HandoffView) -> str:
    """Some lines about each of its owners, then what is missing. No newline at the end."""
    record = view.record
    how = "" if record.error is None else f": {record.error.code}: {record.error.message}"
    lines = [f"handoff {record.handoff_id}: {record.state}{how}"]
    lines += [f"  {name:<10} {text}" for name, text in _facts(view) if text]
    lines += _arrived(record)
    lines += _shards(record)
    lines += _missing(view)
    return "\n".join(lines)


def _facts(view: HandoffView) -> Iterator[tuple[str, str]]:
    record = view.record
    match record.route:
        case DisaggregatedRoute(prefill=prefill, decode=decode):
            yield "route", f"{_worker(prefill)} -> {_worker(decode)}"
        case MixedRoute(mixed=mixed):
            yield "route", _worker(mixed)
    delivered = f", {record.num_delivered_tokens} of them delivered before" if record.num_delivered_tokens else ""
    yield "prompt", f"{record.num_prompt_tokens:,} tokens{delivered}, {record.num_cached_tokens:,} cached at decode"
    yield "router", record.router_id + (f" ({record.router_incarnation})" if record.router_incarnation else "")
    if record.submitted_at:
        yield "submitted", record.submitted_at
    yield "deadline", f"{record.deadline_at}; fence {record.fence}"
    yield "grant", _grant(record.grant)
    yield "source", _grant(record.source)
    yield "pulls", ", ".join(str(role) for role in record.pulled)
    if record.lock is not None:
        yield "lock", f"{record.lock.number}, held by {_worker(record.lock.holder)} since {record.lock.taken_at}"
    elif record.pulled:
        yield "lock", "free"
    yield "memory", _memory(view)
    if view.quarantined:
        text = "given back, but a writer could still touch it then; the worker's log tells its end (quarantine_ended)"
        yield "quarantine", f"{', '.join(sorted(view.quarantined))}: {text}"
    if view.unheard:
        text = "no answer to the release; what it holds comes back with its process, when it is met again, or at the deadline"
        yield "unheard", f"{', '.join(sorted(view.unheard))}: {text}"


def _memory(view: HandoffView) -> str:
    """Whose memory is awaited, else whose has come back. Those that were not heard, or gave theirs into quarantine, have lines of their own."""
    held = set(view.told) - set(view.settled) - set(view.unheard)
    free = set(view.settled) - set(view.quarantined)
    if held:
        return f"may be held by: {', '.join(sorted(held))}"
    if view.quarantined or view.unheard:
        return f"given back by: {', '.join(sorted(free))}" if free else ""
    return "given back everywhere" if view.told else ""


def _worker(worker: WorkerRef) -> str:
    return f"{worker.worker_id} ({worker.incarnation})"


def _grant(grant: Grant | None) -> str:
    if grant is None:
        return ""
    where = f"{grant.worker_id}{f' replica {grant.dp_rank}' if grant.dp_rank else ''}"
    staging = "" if grant.staging_row is None else f", staging row {grant.staging_row}"
    blocks = f"{len(grant.block_ids)} blocks ({_runs(grant.block_ids)})" if grant.block_ids else "no blocks"
    return f"{where}: generation {grant.generation}, {blocks}, slot {grant.slot}{staging}"


def _runs(numbers: tuple[int, ...]) -> str:
    """Numbers that follow each other as one range each, in their order."""
    runs = [[each for _, each in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_MAX_RANGES]]
    return ", ".join(shown) + (" and more" if len(runs) > _MAX_RANGES else "")


def _arrived(record: HandoffRecord) -> Iterator[str]:
    for one in record.progress:
        who = f"source rank {one.source_rank}"
        text = f"{one.num_done} of {one.num_parts} parts, {one.num_bytes:,} bytes"
        yield f"  {one.transfer:<10} {who}: {text}"


def _shards(record: HandoffRecord) -> Iterator[str]:
    for shard in record.shards:
        yield f"  {'shard':<10} {_shard(shard)}"


def _shard(shard: ShardPull) -> str:
    reason = f": {shard.reason}" if shard.reason else ""
    text = f"source rank {shard.source_rank} -> destination rank {shard.destination_rank}: {shard.state}{reason}"
    return f"{text}, {shard.num_bytes:,} bytes in {shard.duration_ms:.2f} ms" if shard.num_bytes else text


def _missing(view: HandoffView) -> Iterator[str]:
    missing = [part for part in view.parts if part.done != part.owed]
    if not missing:
        return
    yield f"  {len(missing)} of {view.num_parts} parts have not arrived in full:"
    for part in missing:
        yield f"    {_part(part)}"
    if len(missing) == len(view.parts) < view.num_parts:
        yield "    and perhaps more: the message had no room for all"


def _part(part: PartView) -> str:
    name = f"{part.namespace} {part.role} of layer {part.layer}"
    ranks = f"source rank {part.source_rank} -> destination rank {part.destination_rank}"
    return f"{name}, {ranks} ({part.transfer}): {_ranges(part.done) or 'nothing'} of {_ranges(part.owed)}"


def _ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"[{start}, {end})" for start, end in ranges[:_MAX_RANGES])
    return shown + (" and more" if len(ranges) > _MAX_RANGES else "")
