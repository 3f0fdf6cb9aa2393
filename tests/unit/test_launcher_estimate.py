"""`pdmesh plan`: the sizes that it tells, held against the engine itself and against sums made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common.engine.checkpoint import expected_shapes
from common.engine.config import ModelConfig, load_config, parse_config
from common.engine.shard import RankShard
from common.engine.weights import load_mtp_weights, load_weights, num_weight_bytes
from common.runtime.settings import SettingsError
from common.worker.cache_need import cache_need
from common.worker.settings import WorkerSettings
from contracts.errors import InvalidValueError
from contracts.manifest import Dtype
from contracts.workers import WorkerRole
from services.launcher.app import EXIT_CLEAN, EXIT_SETTINGS, run
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.core.byte_size import read_size, shown_size
from services.launcher.core.cuts import Cut, cuts_of
from services.launcher.core.estimate import Estimate, make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.rank_weights import num_parameters, rank_weight_bytes
from services.launcher.core.worker_estimate import Capacity, WorkerSize, estimate_worker
from services.launcher.show_estimate import EstimateRequest, estimate_of

MIB, GIB = 1 << 20, 1 << 30


def _raw(**changes: Any) -> dict[str, Any]:
    """The configuration of the dense 27B model, as its config.json nests it."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
    }
    return {"model_type": "qwen3_5", "text_config": text | changes, "tie_word_embeddings": False}


WIDE_GQA = {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32}
"""Eight query heads a KV head: at tp 8 four ranks hold the same one."""
FLAT = {"num_hidden_layers": 8}
"""Two layers with full attention, six with linear attention."""


def _size(role: str, tp: int, dcp: int = 1, **changes: Any) -> WorkerSize:
    values: dict[str, Any] = {"dp": 1, "dtype": Dtype.BFLOAT16, "block_size": 16}
    return WorkerSize(role=role, tp=tp, dcp=dcp, **(values | changes))


def _estimate(config: ModelConfig, prefill_tp: int, tp: int, dcp: int, *, num_tokens: int = 1000) -> Estimate:
    sizes = _size("prefill", prefill_tp), _size("decode", tp, dcp)
    return make_estimate(config, *sizes, num_tokens=num_tokens, memory_bytes=None)


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


@pytest.mark.parametrize("raw", [None, _raw(), _raw(**WIDE_GQA)])
def test_parameters_are_those_of_the_checkpoint(raw: dict[str, Any] | None) -> None:
    """All tensors that a checkpoint must have, but for the draft head's."""
    config = load_config(SHIPPED_MODEL) if raw is None else parse_config(raw)
    shapes = expected_shapes(config, "model.")
    assert num_parameters(config) == sum(prod(shape) for name, shape in shapes.items() if not name.startswith("mtp."))


def test_a_large_models_request_is_the_sum_that_one_makes_by_hand() -> None:
    """64 KiB of keys and values a token, 151 MB of recurrent state and 2.9 MB of conv state in the 27B model, in bf16.

    Context parallelism halves what each of the eight ranks keeps: then no byte of the cache is there twice.
    """
    config = parse_config(_raw())
    one, two = (estimate_worker(config, _size("decode", 8, dcp), num_tokens=32768, memory_bytes=None) for dcp in (1, 2))
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
    config = parse_config(_raw(**FLAT, **WIDE_GQA))
    ranks = estimate_worker(config, _size("decode", 8, dcp), num_tokens=num_tokens, memory_bytes=None).ranks
    owners = Counter(token // 16 % dcp for token in range(num_tokens))
    assert [rank.request.num_tokens for rank in ranks] == [owners[rank % dcp] for rank in range(8)]
    most = len({token // 16 for token in range(num_tokens) if token // 16 % dcp == 0})
    assert {rank.request.num_blocks for rank in ranks} == {most}


@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [5, 1000])
def test_each_prefill_rank_sends_what_a_count_of_heads_says(dcp: int, num_tokens: int) -> None:
    """From two ranks with one KV head each to eight: counted head by head, token by token and layer by layer."""
    config = parse_config(_raw(**FLAT, **WIDE_GQA))
    handoff = _estimate(config, 2, 8, dcp, num_tokens=num_tokens).handoff
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
    config = parse_config(_raw(**FLAT, **WIDE_GQA))
    whole_source, whole_destination = whole[0], whole[1] and dcp == 1
    sizes = (
        _size("prefill", prefill_tp, keeps_draft=True, draft_whole=whole_source),
        _size("decode", tp, dcp, keeps_draft=True, draft_whole=whole_destination, num_speculative_tokens=3),
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
    sizes = _size("prefill", 2), _size("decode", 1, keeps_draft=True, num_speculative_tokens=3)
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
            config, _size("decode", 2, num_speculative_tokens=depth), num_tokens=100, memory_bytes=GIB
        ).request
        for depth in (0, 3)
    )
    assert (four.ssm, four.conv, four.key_value) == (4 * one.ssm, 2 * one.conv, one.key_value)


def test_sources_that_hold_the_same_head_share_the_work() -> None:
    """Four ranks with two KV heads between them send a quarter each."""
    handoff = _estimate(parse_config(_raw(**FLAT, **WIDE_GQA)), 4, 8, 4, num_tokens=1024).handoff
    sent = Counter[int]()
    for flow in handoff.flows:
        sent[flow.source_rank] += flow.total_bytes
    assert set(sent.values()) == {handoff.needed_bytes // 4}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(("tp", "dcp", "per_request"), [(1, 1, 63), (2, 1, 63), (8, 4, 16)])
def test_what_is_said_to_fit_fits_and_one_more_does_not(tp: int, dcp: int, per_request: int, depth: int) -> None:
    """By what a worker with these numbers would allocate, and what its weights take; with guesses and their draft head as without."""
    config, memory = load_config(SHIPPED_MODEL), 64 * MIB
    size = _size("decode", tp, dcp, dtype=Dtype.FLOAT32, num_speculative_tokens=depth, keeps_draft=depth > 0)
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
    config = parse_config(_raw(**WIDE_GQA))

    def capacity(dcp: int, num_staging_rows: int | None = 0) -> Capacity:
        size = _size("decode", 8, dcp, num_staging_rows=num_staging_rows)
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
    config, size = parse_config(_raw(**FLAT)), _size("decode", 8, 2)
    capacity = estimate_worker(config, size, num_tokens=32768, memory_bytes=GIB // 2).capacity
    assert capacity is not None
    assert (capacity.left_bytes, capacity.num_tokens, capacity.num_requests) == (0, 0, 0)


def test_every_cut_is_judged_by_the_rule_that_a_rank_would_name() -> None:
    """Legal ones with the sizes of groups that they allow, the others with the rule."""
    cuts = cuts_of(parse_config(_raw(**WIDE_GQA)), asked=(3,))
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


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("64GiB", 64 * GIB), ("1.5 mib", 3 * MIB // 2), ("4096", 4096), ("7B", 7), ("2 KiB", 2048)]
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    """With or without a unit, which is binary."""
    assert read_size("--memory", text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "64GB", "0", "0.0MiB", "1e9", "one"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With the units that there are."""
    with pytest.raises(InvalidValueError, match=r"--memory: .* a number above 0 and a unit of B, KiB"):
        read_size("--memory", text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_sizes_are_shown_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    """With one place."""
    assert shown_size(num_bytes) == text


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(_raw()))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"prefill": "tp=3"}, ["--prefill tp = 3: divides linear_num_key_heads (16)"]),
        ({"prefill": "tp=8,dcp=2"}, ["--prefill dcp = 2: must be 1 on a prefill worker"]),
        ({"decode": "tp=8,dcp=4"}, ["--decode dcp = 4: divides the 2 ranks that hold one KV head at tp 8"]),
        ({"decode": "tp=2,colour=red"}, ["--decode colour = red: no such setting"]),
        ({"decode": "dcp=0"}, ["--decode dcp = 0: "]),
        ({"memory": "64GB", "decode": "tp=16"}, ["--memory = 64GB: ", "--decode tp = 16: "]),
        ({"prefill": "block_size=32"}, ["block_size = prefill 32, decode 16: the same on both"]),
        ({"decode": "dtype=bfloat16"}, ["dtype = prefill float32, decode bfloat16: the same on both"]),
        ({"num_tokens": 0}, ["tokens = 0: 1 to max_position_embeddings (262144)"]),
        ({"num_tokens": 262145}, ["tokens = 262145: 1 to max_position_embeddings (262144)"]),
        ({"model": "/nowhere"}, ["--model config.json = /nowhere/config.json: a readable file"]),
    ],
)
def test_what_is_not_legal_is_refused_by_name(large: str, changes: dict[str, Any], lines: list[str]) -> None:
    """Field, value and rule, everything at once."""
    request = EstimateRequest(**({"model": large, "prefill": "tp=2", "decode": "tp=8,dcp=2"} | changes))
    with pytest.raises(SettingsError) as refusal:
        estimate_of(request, {})
    told = [f"{each.key} = {each.value}: {each.rule}" for each in refusal.value.problems]
    assert len(told) == len(lines)
    assert all(one.startswith(line) for one, line in zip(told, lines, strict=True))


def test_the_command_prints_tables_or_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures either way, and status 2 for what is refused."""
    words = ["plan", "--model", str(SHIPPED_MODEL), "--prefill", "tp=2", "--decode", "tp=8,dcp=4", "--memory", "1GiB"]
    assert run([*words, "--tokens", "1000"]) == EXIT_CLEAN
    shown = capsys.readouterr().out
    assert "  8   1, 2, 4                1                    4\n" in shown
    assert "  1     7        8   60.0 KiB  15.4 KiB   75.4 KiB\n" in shown
    assert "requests of 1,000 tokens at once: 13,172: num_blocks=210752,num_slots=13172\n" in shown
    assert "moved 637,952 bytes, needed 637,952 bytes: ratio 1.00, in 64 parts\n" in shown
    assert run([*words, "--json"]) == EXIT_CLEAN
    told = json.loads(capsys.readouterr().out)
    assert told["handoff"]["num_tokens"] == 8192, "what the model can hold, where that is less than usual"
    assert told["decode"]["size"]["dcp"] == 4
    assert told["decode"]["capacity"]["memory_bytes"] == GIB
    assert run(["plan", "--model", str(SHIPPED_MODEL), "--decode", "tp=3"]) == EXIT_SETTINGS
    assert "--decode tp = 3: divides num_attention_heads (8)" in capsys.readouterr().err


def test_a_plan_is_made_without_torch(large: str) -> None:
    """On a machine that only looks."""
    program = (
        f"import sys\nfrom services.launcher.app import run\nrun(['plan', '--model', {large!r}, '--memory', '64GiB'])\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr == "False\n"


TABLES = """\
model: 2,551,696 parameters, hidden size 192, 4 layers
  1 with full attention: 8 query heads, 2 KV heads of 32
  3 with linear attention: 8 key heads of 32, 8 value heads of 32

legal cuts
  tp  dcp      KV heads a rank  ranks with the same
  1   1                      2                    1
  2   1                      1                    1
  4   1, 2                   1                    2
  8   1, 2, 4                1                    4
not legal
  dcp 2 at tp 2: divides the 1 ranks that hold one KV head at tp 2
  dcp 4 at tp 4: divides the 2 ranks that hold one KV head at tp 4
  dcp 8 at tp 8: divides the 4 ranks that hold one KV head at tp 8
  tp 16, tp 32: divides num_attention_heads (8)

prefill worker: tp 1, dcp 1, dp 1, float32, blocks of 16 tokens; a request of 100 tokens takes
  rank  query heads  KV heads  key heads  value heads  group.place  tokens  blocks        KV      conv       ssm     in all  weights
  0     0-7          0-1       0-7        0-7          0.0             100       7  56.0 KiB  27.0 KiB  96.0 KiB  179.0 KiB  9.7 MiB
  all                                                                            7  56.0 KiB  27.0 KiB  96.0 KiB  179.0 KiB  9.7 MiB
  4.0 MiB a rank are too few for the weights alone

decode worker: tp 4, dcp 2, dp 2, float32, blocks of 16 tokens; a request of 100 tokens takes
  rank  query heads  KV heads  key heads  value heads  group.place  tokens  blocks        KV      conv       ssm     in all  weights
  0     0-1          0         0-1        0-1          0.0              52       4  16.0 KiB   6.8 KiB  24.0 KiB   46.8 KiB  2.5 MiB
  1     2-3          0         2-3        2-3          0.1              48       4  16.0 KiB   6.8 KiB  24.0 KiB   46.8 KiB  2.5 MiB
  2     4-5          1         4-5        4-5          1.0              52       4  16.0 KiB   6.8 KiB  24.0 KiB   46.8 KiB  2.5 MiB
  3     6-7          1         6-7        6-7          1.1              48       4  16.0 KiB   6.8 KiB  24.0 KiB   46.8 KiB  2.5 MiB
  all                                                                           16  64.0 KiB  27.0 KiB  96.0 KiB  187.0 KiB  9.8 MiB
  4.0 MiB a rank leave 1.5 MiB behind the weights, for caches and all that computing takes
  the longest request alone: 12,256 tokens (the model ends at 8,192)
  requests of 100 tokens at once: 33 in each replica: num_blocks=132,num_slots=33

what a handoff of 100 tokens moves from prefill ranks to decode ranks
  from  to   parts        KV     states     in all
  0     0        8  13.0 KiB   30.8 KiB   43.8 KiB
  0     1        8  12.0 KiB   30.8 KiB   42.8 KiB
  0     2        8  13.0 KiB   30.8 KiB   43.8 KiB
  0     3        8  12.0 KiB   30.8 KiB   42.8 KiB
  0     all     32  50.0 KiB  123.0 KiB  173.0 KiB
  moved 177,152 bytes, needed 177,152 bytes: ratio 1.00, in 32 parts
"""


def test_tables_say_what_guessing_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The draft head's share has a column where one is kept, and so has what is moved of it."""
    words = ["--prefill", "tp=2", "--decode", "tp=1", "--tokens", "100", "--set", "num_speculative_tokens=3"]
    assert run(["plan", "--model", str(SHIPPED_MODEL), *words, "--set", "mtp_draft_body_tp1=1"]) == EXIT_CLEAN
    lines = capsys.readouterr().out.splitlines()
    assert "  nothing is guessed here; the draft head's cache is whole on each rank" in lines
    assert "  up to 3 guesses in a step: 4 rows of states; the draft head's cache is whole on each rank" in lines
    sums = [line for line in lines if line.startswith("  all ")]
    assert sums[1].endswith("  7  56.0 KiB  54.0 KiB  384.0 KiB  56.8 KiB  550.8 KiB  11.8 MiB")
    assert "  1     all     10  25.0 KiB  61.5 KiB  24.8 KiB  111.2 KiB" in lines
    assert run(["plan", "--model", str(SHIPPED_MODEL), *words, "--set", "drafter=ngram"]) == EXIT_CLEAN
    lines = capsys.readouterr().out.splitlines()
    assert "  up to 3 guesses in a step: 4 rows of states; the draft head's cache is not kept" in lines
    assert not any("draft  " in line for line in lines)


def test_tables_say_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word: the model, its cuts, both workers, what fits and what does not, and who sends how much to whom."""
    words = ["--prefill", "tp=1", "--decode", "tp=4,dcp=2,dp=2", "--memory", "4MiB", "--tokens", "100"]
    assert run(["plan", "--model", str(SHIPPED_MODEL), *words]) == EXIT_CLEAN
    assert capsys.readouterr().out == TABLES


def test_memory_without_room_for_a_block_is_told() -> None:
    """The weights fit, and nothing else does; where one request fits and two do not, no settings are missing."""
    config = load_config(SHIPPED_MODEL)
    sizes = _size("prefill", 1, dtype=Dtype.FLOAT32), _size("decode", 8, 4, dtype=Dtype.FLOAT32)
    weights = rank_weight_bytes(RankShard(config=config, tp_size=8), Dtype.FLOAT32)

    def told(left_bytes: int) -> str:
        return render_estimate(make_estimate(config, *sizes, num_tokens=8192, memory_bytes=weights + left_bytes))

    assert (
        "leave 8.8 KiB behind the weights, for caches and all that computing takes\n  not one block and one state fit\n"
    ) in told(9000)
    assert "  the longest request alone: 1,152 tokens\n  requests of 8,192 tokens at once: 0\n" in told(100_000)
