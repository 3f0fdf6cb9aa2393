"""What `pdmesh plan` prints, letter by letter."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.engine.model.config import parse_config
from contracts.manifest import Dtype
from services.launcher.core.estimate import Estimate, make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.worker_estimate import WorkerSize

SMALL = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}


def estimate(memory_bytes: int | None = 1 << 20, *, dp: int = 2, num_tokens: int = 1000) -> Estimate:
    """One prefill rank, four decode ranks of which two share the blocks of a sequence."""
    config = parse_config({"model_type": "qwen3_5", "text_config": SMALL, "tie_word_embeddings": False})
    sizes: dict[str, Any] = {"dtype": Dtype.BFLOAT16, "block_size": 16}
    prefill = WorkerSize(role="prefill", tp=1, dp=1, dcp=1, **sizes)
    decode = WorkerSize(role="decode", tp=4, dp=dp, dcp=2, **sizes)
    return make_estimate(config, prefill, decode, num_tokens=num_tokens, memory_bytes=memory_bytes)


def test_a_plan_is_printed_block_by_block() -> None:
    """Model, cuts, both workers with their sums, what fits, and what a handoff moves; numbers to the right, no blank at an end."""
    assert render_estimate(estimate()).splitlines() == [
        "model: 348,864 parameters, hidden size 64, 4 layers",
        "  1 with full attention: 4 query heads, 1 KV heads of 16",
        "  3 with linear attention: 4 key heads of 16, 8 value heads of 16",
        "  a draft head of 47,456 parameters beside them",
        "",
        "legal cuts",
        "  tp  dcp      KV heads a rank  ranks with the same",
        "  1   1                      1                    1",
        "  2   1, 2                   1                    2",
        "  4   1, 2, 4                1                    4",
        "not legal",
        "  tp 8, tp 16, tp 32: divides num_attention_heads (4)",
        "",
        "prefill worker: tp 1, dcp 1, dp 1, bfloat16, blocks of 16 tokens; a request of 1,000 tokens takes",
        "  rank  query heads  KV heads  key heads  value heads  group.place  tokens  blocks        KV     conv       ssm    in all    weights",
        "  0     0-3          0         0-3        0-7          0.0           1,000      63  63.0 KiB  4.5 KiB  24.0 KiB  91.5 KiB  682.9 KiB",
        "  all                                                                           63  63.0 KiB  4.5 KiB  24.0 KiB  91.5 KiB  682.9 KiB",
        "  1.0 MiB a rank leave 341.1 KiB behind the weights, for caches and all that computing takes",
        "  the longest request alone: 4,864 tokens (the model ends at 2,048)",
        "  requests of 1,000 tokens at once: 3: num_blocks=189,num_slots=3",
        "",
        "decode worker: tp 4, dcp 2, dp 2, bfloat16, blocks of 16 tokens; a request of 1,000 tokens takes",
        "  rank  query heads  KV heads  key heads  value heads  group.place  tokens  blocks         KV     conv       ssm     in all    weights",
        "  0     0            0         0          0-1          0.0             504      32   32.0 KiB  1.1 KiB   6.0 KiB   39.1 KiB  175.6 KiB",
        "  1     1            0         1          2-3          0.1             496      32   32.0 KiB  1.1 KiB   6.0 KiB   39.1 KiB  175.6 KiB",
        "  2     2            0         2          4-5          1.0             504      32   32.0 KiB  1.1 KiB   6.0 KiB   39.1 KiB  175.6 KiB",
        "  3     3            0         3          6-7          1.1             496      32   32.0 KiB  1.1 KiB   6.0 KiB   39.1 KiB  175.6 KiB",
        "  all                                                                          128  128.0 KiB  4.5 KiB  24.0 KiB  156.5 KiB  702.4 KiB",
        "  1.0 MiB a rank leave 848.4 KiB behind the weights, for caches and all that computing takes",
        "  the longest request alone: 26,528 tokens (the model ends at 2,048)",
        "  requests of 1,000 tokens at once: 21 in each replica: num_blocks=672,num_slots=21",
        "",
        "what a handoff of 1,000 tokens moves from prefill ranks to decode ranks",
        "  from  to   parts         KV    states     in all",
        "  0     0        8   31.5 KiB   7.1 KiB   38.6 KiB",
        "  0     1        8   31.0 KiB   7.1 KiB   38.1 KiB",
        "  0     2        8   31.5 KiB   7.1 KiB   38.6 KiB",
        "  0     3        8   31.0 KiB   7.1 KiB   38.1 KiB",
        "  0     all     32  125.0 KiB  28.5 KiB  153.5 KiB",
        "  moved 157,184 bytes, needed 157,184 bytes: ratio 1.00, in 32 parts",
    ]


def test_what_does_not_fit_is_said() -> None:
    """On the decode worker one request fits and no more."""
    lines = render_estimate(estimate(1 << 18)).splitlines()
    for line in (
        "  256.0 KiB a rank leave 80.4 KiB behind the weights, for caches and all that computing takes",
        "  the longest request alone: 2,080 tokens (the model ends at 2,048)",
        "  requests of 1,000 tokens at once: 1 in each replica: num_blocks=32,num_slots=1",
    ):
        assert line in lines


def test_a_single_replica_is_not_spoken_of() -> None:
    """What fits then fits into the worker; a request within the model's length needs no remark, and one that does not fit no settings."""
    lines = render_estimate(estimate(220 << 10, dp=1)).splitlines()
    assert "  the longest request alone: 928 tokens" in lines
    assert "  requests of 1,000 tokens at once: 0" in lines
    assert not any("a rank leave" in line for line in render_estimate(estimate(None)).splitlines())


def test_a_plan_without_memory_has_no_capacity() -> None:
    """Nobody asked what fits."""
    assert [worker.capacity for worker in estimate(None).workers] == [None, None]


def test_sums_of_a_worker_are_those_of_its_ranks() -> None:
    """Bytes and blocks of one request, and its tokens once."""
    worker = estimate().decode
    whole, parts = worker.request, [rank.request for rank in worker.ranks]
    assert (whole.num_tokens, whole.num_blocks) == (1000, sum(part.num_blocks for part in parts))
    assert whole.total == sum(part.total for part in parts) == whole.key_value + whole.conv + whole.ssm
    assert [rank.linear_key_heads for rank in worker.ranks] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [(rank.rank, rank.query_heads) for rank in worker.ranks] == [(n, (n, n + 1)) for n in range(4)]


def test_a_tied_table_counts_once() -> None:
    """In the model and on every rank."""
    tied = parse_config({"model_type": "qwen3_5", "text_config": SMALL, "tie_word_embeddings": True})
    two = estimate()
    one = make_estimate(tied, two.prefill.size, two.decode.size, num_tokens=1000, memory_bytes=None)
    assert render_estimate(one).startswith(f"model: {348_864 - 1024 * 64:,} parameters")
    saved = two.prefill.ranks[0].weight_bytes - one.prefill.ranks[0].weight_bytes
    assert saved == 1024 * 64 * 2


def test_staging_rows_are_bounded_by_slots() -> None:
    """A rank keeps no more rows for states on their way than it has slots."""
    decode = estimate().decode
    assert decode.capacity is not None

    def requests(num_staging_rows: int | None) -> int:
        size = replace(decode.size, num_staging_rows=num_staging_rows)
        made = make_estimate(estimate().config, estimate().prefill.size, size, num_tokens=1000, memory_bytes=1 << 20)
        assert made.decode.capacity is not None
        return made.decode.capacity.num_requests

    assert requests(0) == decode.capacity.num_requests
    assert requests(None) == requests(1000) < requests(0)
