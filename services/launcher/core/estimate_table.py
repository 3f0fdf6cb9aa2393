"""`pdmesh plan` as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.engine.model.config import ModelConfig
from services.launcher.core.byte_size import shown_size
from services.launcher.core.cuts import Cuts
from services.launcher.core.estimate import Estimate
from services.launcher.core.handoff_estimate import Flow, HandoffEstimate
from services.launcher.core.rank_weights import num_draft_parameters, num_parameters
from services.launcher.core.worker_estimate import Capacity, RequestBytes, WorkerEstimate

_ALL = "all"


def render_estimate(estimate: Estimate) -> str:
    """The whole of it, block by block. No newline at the end."""
    workers = [line for worker in estimate.workers for line in ("", *_worker_lines(estimate.config, worker))]
    lines = [
        *_model_lines(estimate.config),
        "",
        *_cut_lines(estimate.cuts),
        *workers,
        "",
        *_handoff_lines(estimate.handoff),
    ]
    return "\n".join(lines)


def _model_lines(config: ModelConfig) -> Iterator[str]:
    yield (
        f"model: {num_parameters(config):,} parameters, hidden size {config.hidden_size:,}, "
        f"{config.num_hidden_layers} layers"
    )
    yield (
        f"  {len(config.full_layers)} with full attention: {config.num_attention_heads} query heads, "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}"
    )
    yield (
        f"  {len(config.linear_layers)} with linear attention: {config.linear_num_key_heads} key heads of "
        f"{config.linear_key_head_dim}, {config.linear_num_value_heads} value heads of {config.linear_value_head_dim}"
    )
    draft = num_draft_parameters(config)
    yield f"  a draft head of {draft:,} parameters beside them" if draft else "  no draft head"


def _cut_lines(cuts: Cuts) -> Iterator[str]:
    yield "legal cuts"
    rows = [(str(cut.tp), _comma(cut.dcp), str(cut.kv_heads_per_rank), str(cut.num_replicas)) for cut in cuts.legal]
    yield from _table(("tp", "dcp", "KV heads a rank", "ranks with the same"), rows, num_left=2)
    yield "not legal"
    by_rule: dict[str, list[str]] = {}
    for refused in cuts.refused:
        name = f"tp {refused.tp}" if refused.dcp is None else f"dcp {refused.dcp} at tp {refused.tp}"
        by_rule.setdefault(refused.rule, []).append(name)
    for rule, names in by_rule.items():
        yield f"  {', '.join(names)}: {rule}"


def _worker_lines(config: ModelConfig, worker: WorkerEstimate) -> Iterator[str]:
    size, whole = worker.size, worker.request
    yield (
        f"{size.role} worker: tp {size.tp}, dcp {size.dcp}, dp {size.dp}, {size.dtype}, blocks of {size.block_size} tokens; "
        f"a request of {whole.num_tokens:,} tokens takes"
    )
    drafts = size.keeps_draft
    if size.num_speculative_tokens or drafts:
        depth = size.num_speculative_tokens
        guessed = f"up to {depth} guesses in a step: {depth + 1} rows of states" if depth else "nothing is guessed here"
        kept = "whole on each rank" if size.draft_whole else "cut like the model's" if drafts else "not kept"
        yield f"  {guessed}; the draft head's cache is {kept}"
    rows = []
    for rank in worker.ranks:
        heads = (rank.query_heads, rank.kv_heads, rank.linear_key_heads, rank.linear_value_heads)
        part = rank.request
        group = f"{rank.dcp_group}.{rank.dcp_rank}"
        counts = (f"{part.num_tokens:,}", f"{part.num_blocks:,}")
        sizes = map(shown_size, (*_held(part, drafts=drafts), part.total, rank.weight_bytes))
        rows.append((str(rank.rank), *map(_span, heads), group, *counts, *sizes))
    sums = map(shown_size, (*_held(whole, drafts=drafts), whole.total))
    weights = shown_size(sum(rank.weight_bytes for rank in worker.ranks))
    rows.append((_ALL, "", "", "", "", "", "", f"{whole.num_blocks:,}", *sums, weights))
    head = (
        "rank",
        "query heads",
        "KV heads",
        "key heads",
        "value heads",
        "group.place",
        "tokens",
        "blocks",
        "KV",
        "conv",
        "ssm",
        *(("draft",) if drafts else ()),
        "in all",
        "weights",
    )
    yield from _table(head, rows, num_left=6)
    if worker.capacity is not None:
        yield from _capacity_lines(config, worker, worker.capacity)


def _held(request: RequestBytes, *, drafts: bool) -> tuple[int, ...]:
    held = request.key_value, request.conv, request.ssm
    return (*held, request.draft) if drafts else held


def _capacity_lines(config: ModelConfig, worker: WorkerEstimate, capacity: Capacity) -> Iterator[str]:
    size, length = worker.size, worker.request.num_tokens
    memory, left = shown_size(capacity.memory_bytes), shown_size(capacity.left_bytes)
    if not capacity.left_bytes:
        yield f"  {memory} a rank are too few for the weights alone"
        return
    yield f"  {memory} a rank leave {left} behind the weights, for caches and all that computing takes"
    if not capacity.num_tokens:
        yield "  not one block and one state fit"
        return
    beyond = config.max_position_embeddings
    note = f" (the model ends at {beyond:,})" if capacity.num_tokens > beyond else ""
    yield f"  the longest request alone: {capacity.num_tokens:,} tokens{note}"
    each = " in each replica" if size.dp > 1 else ""
    settings = f": num_blocks={capacity.num_blocks},num_slots={capacity.num_slots}" if capacity.num_requests else ""
    if capacity.max_step_tokens > size.max_step_tokens:
        settings += f",max_step_tokens={capacity.max_step_tokens}"
    yield f"  requests of {length:,} tokens at once: {capacity.num_requests:,}{each}{settings}"


def _handoff_lines(handoff: HandoffEstimate) -> Iterator[str]:
    yield f"what a handoff of {handoff.num_tokens:,} tokens moves from prefill ranks to decode ranks"
    rows = []
    for flow in handoff.flows:
        sizes = map(shown_size, _carried([flow], drafts=handoff.has_drafts))
        rows.append((str(flow.source_rank), str(flow.destination_rank), f"{flow.num_parts:,}", *sizes))
    for source in dict.fromkeys(flow.source_rank for flow in handoff.flows):
        ours = [flow for flow in handoff.flows if flow.source_rank == source]
        sizes = map(shown_size, _carried(ours, drafts=handoff.has_drafts))
        rows.append((str(source), _ALL, f"{sum(flow.num_parts for flow in ours):,}", *sizes))
    draft = ("draft",) if handoff.has_drafts else ()
    yield from _table(("from", "to", "parts", "KV", "states", *draft, "in all"), rows, num_left=2)
    if handoff.why_no_drafts:
        yield f"  nothing is guessed behind it by a draft head: {handoff.why_no_drafts}"
    yield (
        f"  moved {handoff.moved_bytes:,} bytes, needed {handoff.needed_bytes:,} bytes: ratio {handoff.ratio:.2f}, "
        f"in {sum(flow.num_parts for flow in handoff.flows):,} parts"
    )


def _carried(flows: Sequence[Flow], *, drafts: bool) -> tuple[int, ...]:
    paged, states, draft, whole = (
        sum(values)
        for values in zip(
            *((flow.key_value_bytes, flow.state_bytes, flow.draft_bytes, flow.total_bytes) for flow in flows),
            strict=True,
        )
    )
    return (paged, states, draft, whole) if drafts else (paged, states, whole)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> Iterator[str]:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _span(ends: tuple[int, int]) -> str:
    """A half-open interval as people count: first to last."""
    first, last = ends[0], ends[1] - 1
    return str(first) if first == last else f"{first}-{last}"


def _comma(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
