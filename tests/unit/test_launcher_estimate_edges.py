"""`pdmesh plan` at its edges: memory that is just enough, a model that ends just there, and a draft head that is cut or whole."""

from __future__ import annotations

import msgspec
import pytest

from common.engine.model.config import load_config
from common.engine.model.shard import RankShard
from common.worker.cache_need import cache_need
from common.worker.settings import WorkerSettings
from contracts.handoff import max_granted_blocks
from contracts.manifest import Dtype
from contracts.workers import WorkerRole
from services.launcher.app import EXIT_CLEAN, run
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.core.estimate import make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.rank_weights import rank_weight_bytes
from services.launcher.core.worker_estimate import Capacity, WorkerSize, estimate_worker

MIB = 1 << 20
CONFIG = load_config(SHIPPED_MODEL)
ONE = WorkerSize(role="decode", tp=1, dcp=1, dp=1, dtype=Dtype.FLOAT32, block_size=16)


def capacity_of(size: WorkerSize, memory_bytes: int) -> Capacity:
    """What fits beside the weights."""
    capacity = estimate_worker(CONFIG, size, num_tokens=1000, memory_bytes=memory_bytes).capacity
    assert capacity is not None
    return capacity


def test_memory_that_is_just_enough_is_enough() -> None:
    """To the byte: with one less there is one request less."""
    roomy = capacity_of(ONE, 64 * MIB)
    settings = WorkerSettings(
        worker_id="d", model=SHIPPED_MODEL, tp=1, num_blocks=roomy.num_blocks, num_slots=roomy.num_slots
    )
    need = cache_need(settings, WorkerRole.DECODE)
    assert need is not None
    least = need.num_bytes + rank_weight_bytes(RankShard(config=CONFIG), Dtype.FLOAT32)
    assert capacity_of(ONE, least).num_requests == roomy.num_requests
    assert capacity_of(ONE, least - 1).num_requests == roomy.num_requests - 1


def test_no_more_blocks_are_promised_than_messages_can_name() -> None:
    """A worker of small blocks refuses a request whose blocks no grant holds, however much memory there is."""
    size, memory = msgspec.structs.replace(ONE, block_size=1), 1 << 36
    capacity = capacity_of(size, memory)
    assert capacity.num_requests > 1
    most = max_granted_blocks(capacity.num_tokens)
    assert capacity.num_tokens <= most
    longer = estimate_worker(CONFIG, size, num_tokens=most + 1000, memory_bytes=memory).capacity
    assert longer is not None
    assert longer.num_requests == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_rank_keeps_its_share_of_the_draft_heads_weights_or_all_of_them(*, whole: bool) -> None:
    """Beside its share of the model's."""
    size = msgspec.structs.replace(ONE, tp=2, keeps_draft=True, draft_whole=whole)
    worker = estimate_worker(CONFIG, size, num_tokens=100, memory_bytes=None)
    for rank in worker.ranks:
        share = RankShard(config=CONFIG, tp_rank=rank.rank, tp_size=2)
        kept = RankShard(config=CONFIG) if whole else share
        assert rank.weight_bytes == rank_weight_bytes(share, Dtype.FLOAT32, kept)


@pytest.mark.parametrize(("beyond", "told"), [(0, False), (1, True)])
def test_that_the_model_ends_is_said_only_where_more_would_fit(beyond: int, *, told: bool) -> None:
    """A request as long as the model reaches is no remark."""
    estimate = make_estimate(
        CONFIG, msgspec.structs.replace(ONE, role="prefill"), ONE, num_tokens=1000, memory_bytes=64 * MIB
    )
    ends = CONFIG.max_position_embeddings + beyond
    prefill, decode = (
        msgspec.structs.replace(worker, capacity=msgspec.structs.replace(capacity_of(ONE, 64 * MIB), num_tokens=ends))
        for worker in estimate.workers
    )
    text = render_estimate(msgspec.structs.replace(estimate, prefill=prefill, decode=decode))
    assert f"  the longest request alone: {ends:,} tokens" in text
    assert ("(the model ends at" in text) is told


def test_tables_show_a_draft_heads_cache_that_is_cut_like_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it lies is said in words, how much there is and how much moves in columns of their own."""
    words = ["--prefill", "tp=2", "--decode", "tp=1", "--tokens", "100", "--set", "num_speculative_tokens=3"]
    assert run(["plan", "--model", str(SHIPPED_MODEL), *words]) == EXIT_CLEAN
    lines = capsys.readouterr().out.splitlines()
    assert "  up to 3 guesses in a step: 4 rows of states; the draft head's cache is cut like the model's" in lines
    heads = [line.split() for line in lines if line.split()[:1] in (["rank"], ["from"])]
    assert [head[head.index("draft") - 1] for head in heads] == ["ssm", "ssm", "states"]
