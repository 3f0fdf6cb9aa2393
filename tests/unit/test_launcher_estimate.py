"""`pdmesh plan`: the sizes that it tells, held against the engine itself and against sums made by hand."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch

from common.engine.model.checkpoint import expected_shapes
from common.engine.model.config import load_config, parse_config
from common.engine.model.shard import RankShard
from common.engine.model.weights import load_mtp_weights, load_weights, num_weight_bytes
from common.worker.cache_need import cache_need
from common.worker.settings import WorkerSettings
from contracts.manifest import Dtype
from contracts.workers import WorkerRole
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.core.cuts import Cut, cuts_of
from services.launcher.core.estimate import make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.rank_weights import num_draft_parameters, num_parameters, rank_weight_bytes
from services.launcher.core.worker_estimate import Capacity, estimate_worker
from tests.unit.estimated_workers import FLAT, GIB, MIB, WIDE_GQA, estimate_pair, raw_config, worker_size


@pytest.mark.parametrize(("tp", "dtype"), [(1, Dtype.FLOAT32), (2, Dtype.BFLOAT16), (8, Dtype.FLOAT32)])
def test_weights_are_those_that_a_rank_loads(tp: int, dtype: Dtype) -> None:
    """To the byte, for each rank: the shapes of the configuration say as much as the files."""
    config = load_config(SHIPPED_MODEL)
    torch_dtype = torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16
    for rank in range(tp):
        shard = RankShard(config=config, tp_rank=rank, tp_size=tp)
        assert rank_weight_bytes(shard, dtype) == num_weight_bytes(load_weights(SHIPPED_MODEL, shard, torch_dtype))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("tp", "dtype"), [(1, Dtype.FLOAT32), (4, Dtype.BFLOAT16)])
def test_a_draft_heads_weights_are_those_that_a_rank_loads(tp: int, dtype: Dtype, *, whole: bool) -> None:
    """To the byte, with its layer cut like the model's or whole on each rank."""
    config = load_config(SHIPPED_MODEL)
    torch_dtype = torch.float32 if dtype is Dtype.FLOAT32 else torch.bfloat16
    for rank in range(tp):
        shard = RankShard(config=config, tp_rank=rank, tp_size=tp)
        draft = RankShard(config=config) if whole else shard
        loaded = load_weights(SHIPPED_MODEL, shard, torch_dtype), load_mtp_weights(SHIPPED_MODEL, draft, torch_dtype)
        assert rank_weight_bytes(shard, dtype, draft) == num_weight_bytes(*loaded)


@pytest.mark.parametrize("raw", [None, raw_config(), raw_config(**WIDE_GQA)])
def test_parameters_are_those_of_the_checkpoint(raw: dict[str, Any] | None) -> None:
    """All tensors that a checkpoint must have, but for the draft head's."""
    config = load_config(SHIPPED_MODEL) if raw is None else parse_config(raw)
    shapes = expected_shapes(config, "model.")
    assert num_parameters(config) == sum(prod(shape) for name, shape in shapes.items() if not name.startswith("mtp."))
    assert num_draft_parameters(config) == sum(prod(shape) for name, shape in shapes.items() if name.startswith("mtp."))


def test_a_large_models_request_is_the_sum_that_one_makes_by_hand() -> None:
    """64 KiB of keys and values a token, 151 MB of recurrent state and 2.9 MB of conv state in the 27B model, in bf16.

    Context parallelism halves what each of the eight ranks keeps: then no byte of the cache is there twice.
    """
    config = parse_config(raw_config())
    one, two = (
        estimate_worker(config, worker_size("decode", 8, dcp), num_tokens=32768, memory_bytes=None) for dcp in (1, 2)
    )
    whole = two.request
    assert whole.key_value == 32768 * 16 * 2 * 4 * 256 * 2 == 32768 * 65536
    assert whole.ssm == 48 * 48 * 128 * 128 * 4 == 150_994_944
    assert whole.conv == 48 * 3 * (2 * 16 + 48) * 128 * 2 == 2_949_120
    assert one.request.key_value == 2 * whole.key_value
    ranks = two.ranks
    assert {rank.request.key_value for rank in ranks} == {whole.key_value // 8}
    assert {rank.request.ssm for rank in ranks} == {whole.ssm // 8}
    assert [(rank.dcp_group, rank.dcp_rank, rank.kv_heads) for rank in ranks[:3]] == [
        (0, 0, (0, 1)),
        (0, 1, (0, 1)),
        (1, 0, (1, 2)),
    ]


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_tokens_of_a_group_add_up(dcp: int, num_tokens: int) -> None:
    """Counted token by token: each lies with the rank that its block's number says, and all set aside the same blocks."""
    config = parse_config(raw_config(**FLAT, **WIDE_GQA))
    ranks = estimate_worker(config, worker_size("decode", 8, dcp), num_tokens=num_tokens, memory_bytes=None).ranks
    owners = Counter(token // 16 % dcp for token in range(num_tokens))
    assert [rank.request.num_tokens for rank in ranks] == [owners[rank % dcp] for rank in range(8)]
    most = len({token // 16 for token in range(num_tokens) if token // 16 % dcp == 0})
    assert {rank.request.num_blocks for rank in ranks} == {most}


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [5, 1000])
def test_each_prefill_rank_sends_what_a_count_of_heads_says(dcp: int, num_tokens: int) -> None:
    """From two ranks with one KV head each to eight: counted head by head, token by token and layer by layer."""
    config = parse_config(raw_config(**FLAT, **WIDE_GQA))
    handoff = estimate_pair(config, 2, 8, dcp, num_tokens=num_tokens).handoff
    wanted = {}
    for destination in range(8):
        source = destination // 4
        tokens = sum(token // 16 % dcp == destination % dcp for token in range(num_tokens))
        paged = 2 * 2 * tokens * 256 * 2
        states = 6 * (3 * (2 * 2 + 4) * 128 * 2 + 4 * 128 * 128 * 4)
        wanted[source, destination] = (2 * 2 + 6 * 2, paged, states)
    found = {
        (flow.source_rank, flow.destination_rank): (flow.num_parts, flow.key_value_bytes, flow.state_bytes)
        for flow in handoff.flows
    }
    assert found == wanted
    assert handoff.moved_bytes == handoff.needed_bytes == sum(paged + states for _, paged, states in wanted.values())
    assert handoff.ratio == 1.0


@pytest.mark.parametrize("whole", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("prefill_tp", "tp", "dcp"), [(2, 1, 1), (1, 2, 1), (2, 8, 4), (2, 8, 1)])
@pytest.mark.parametrize("num_tokens", [1, 17, 1000])
def test_a_draft_moves_what_a_count_of_pairs_says(
    num_tokens: int, prefill_tp: int, tp: int, dcp: int, whole: tuple[bool, bool]
) -> None:
    """A pair for every token but the first, on the ranks that hold its heads and its block, and one hidden state for each rank."""
    config = parse_config(raw_config(**FLAT, **WIDE_GQA))
    whole_source, whole_destination = whole[0], whole[1] and dcp == 1
    sizes = (
        worker_size("prefill", prefill_tp, keeps_draft=True, draft_whole=whole_source),
        worker_size("decode", tp, dcp, keeps_draft=True, draft_whole=whole_destination, num_speculative_tokens=3),
    )
    handoff = make_estimate(config, *sizes, num_tokens=num_tokens, memory_bytes=None).handoff
    heads = 2 if whole_destination else max(1, 2 // tp)
    wanted = Counter[int]()
    for destination in range(tp):
        pairs = sum(token // 16 % dcp == destination % dcp for token in range(1, num_tokens))
        wanted[destination] = 2 * pairs * heads * 256 * 2 + 5120 * 2
    found = Counter[int]()
    for flow in handoff.flows:
        found[flow.destination_rank] += flow.draft_bytes
    assert found == wanted
    assert (handoff.moved_bytes, handoff.ratio) == (handoff.needed_bytes, 1.0)
    assert handoff.has_drafts


def test_a_draft_that_one_worker_keeps_stays_where_it_is() -> None:
    """The rest is moved, and it is said why nothing will be guessed."""
    config = load_config(SHIPPED_MODEL)
    sizes = worker_size("prefill", 2), worker_size("decode", 1, keeps_draft=True, num_speculative_tokens=3)
    estimate = make_estimate(config, *sizes, num_tokens=100, memory_bytes=None)
    assert not estimate.handoff.has_drafts
    assert estimate.handoff.ratio == 1.0
    assert f"nothing is guessed behind it by a draft head: {estimate.handoff.why_no_drafts}\n" in render_estimate(
        estimate
    )


def test_guesses_take_rows_of_states() -> None:
    """Four times the recurrent state with three guesses, and as much of the convolution as it looks back further."""
    config = load_config(SHIPPED_MODEL)
    one, four = (
        estimate_worker(
            config, worker_size("decode", 2, num_speculative_tokens=depth), num_tokens=100, memory_bytes=GIB
        ).request
        for depth in (0, 3)
    )
    assert (four.ssm, four.conv, four.key_value) == (4 * one.ssm, 2 * one.conv, one.key_value)


def test_sources_that_hold_the_same_head_share_the_work() -> None:
    """Four ranks with two KV heads between them send a quarter each."""
    handoff = estimate_pair(parse_config(raw_config(**FLAT, **WIDE_GQA)), 4, 8, 4, num_tokens=1024).handoff
    sent = Counter[int]()
    for flow in handoff.flows:
        sent[flow.source_rank] += flow.total_bytes
    assert set(sent.values()) == {handoff.needed_bytes // 4}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(("tp", "dcp", "per_request"), [(1, 1, 63), (2, 1, 63), (8, 4, 16)])
def test_what_is_said_to_fit_fits_and_one_more_does_not(tp: int, dcp: int, per_request: int, depth: int) -> None:
    """By what a worker with these numbers would allocate, and what its weights take; with guesses and their draft head as without."""
    config, memory = load_config(SHIPPED_MODEL), 64 * MIB
    size = worker_size("decode", tp, dcp, dtype=Dtype.FLOAT32, num_speculative_tokens=depth, keeps_draft=depth > 0)
    worker = estimate_worker(config, size, num_tokens=1000, memory_bytes=memory)
    capacity = worker.capacity
    assert capacity is not None

    def taken(num_blocks: int, num_slots: int) -> int:
        settings = WorkerSettings(
            worker_id="d",
            model=SHIPPED_MODEL,
            tp=tp,
            dcp=dcp,
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_step_tokens=9999,
            num_speculative_tokens=depth,
        )
        need = cache_need(settings, WorkerRole.DECODE)
        assert need is not None
        return need.num_bytes // tp + worker.ranks[0].weight_bytes

    assert capacity.num_slots == capacity.num_requests > 1
    assert capacity.num_blocks == capacity.num_requests * per_request
    assert (
        taken(capacity.num_blocks, capacity.num_slots)
        <= memory
        < taken(capacity.num_blocks + per_request, capacity.num_slots + 1)
    )
    longest = capacity.num_tokens // (16 * dcp)
    assert taken(longest, 1) <= memory < taken(longest + 1, 1)


def test_context_parallelism_multiplies_what_fits() -> None:
    """Twice the tokens behind the same weights, but for less than a block a rank; staging rows take room away."""
    config = parse_config(raw_config(**WIDE_GQA))

    def capacity(dcp: int, num_staging_rows: int | None = 0) -> Capacity:
        size = worker_size("decode", 8, dcp, num_staging_rows=num_staging_rows)
        found = estimate_worker(config, size, num_tokens=32768, memory_bytes=16 * GIB).capacity
        assert found is not None
        return found

    one, two, four = capacity(1), capacity(2), capacity(4)
    assert (two.num_tokens, four.num_tokens) == (2 * one.num_tokens, 4 * one.num_tokens)
    assert four.num_requests > two.num_requests > one.num_requests
    assert (
        capacity(4, num_staging_rows=None).num_requests
        < capacity(4, num_staging_rows=3).num_requests
        < four.num_requests
    )


def test_weights_that_do_not_fit_leave_nothing() -> None:
    """That is an answer, not an error."""
    config, size = parse_config(raw_config(**FLAT)), worker_size("decode", 8, 2)
    capacity = estimate_worker(config, size, num_tokens=32768, memory_bytes=GIB // 2).capacity
    assert capacity is not None
    assert (capacity.left_bytes, capacity.num_tokens, capacity.num_requests) == (0, 0, 0)


def test_every_cut_is_judged_by_the_rule_that_a_rank_would_name() -> None:
    """Legal ones with the sizes of groups that they allow, the others with the rule."""
    cuts = cuts_of(parse_config(raw_config(**WIDE_GQA)), asked=(3,))
    assert cuts.legal == (
        Cut(tp=1, dcp=(1,), kv_heads_per_rank=2, num_replicas=1),
        Cut(tp=2, dcp=(1,), kv_heads_per_rank=1, num_replicas=1),
        Cut(tp=4, dcp=(1, 2), kv_heads_per_rank=1, num_replicas=2),
        Cut(tp=8, dcp=(1, 2, 4), kv_heads_per_rank=1, num_replicas=4),
        Cut(tp=16, dcp=(1, 2, 4, 8), kv_heads_per_rank=1, num_replicas=8),
    )
    rules = {(each.tp, each.dcp): each.rule for each in cuts.refused}
    assert rules[3, None] == "divides num_attention_heads (16)"
    assert rules[32, None] == "divides num_attention_heads (16)"
    assert rules[8, 3] == rules[8, 8] == "divides the 4 ranks that hold one KV head at tp 8"
