"""`pdmesh plan` as a command: sizes as people write them, what it refuses, and what it prints, word for word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.engine.model.config import load_config
from common.engine.model.shard import RankShard
from common.runtime.settings import SettingsError
from contracts.errors import InvalidValueError
from contracts.manifest import Dtype
from services.launcher.app import EXIT_CLEAN, EXIT_SETTINGS, run
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.core.byte_size import read_size, shown_size
from services.launcher.core.estimate import make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.rank_weights import rank_weight_bytes
from services.launcher.show_estimate import EstimateRequest, estimate_of
from tests.unit.estimated_workers import GIB, MIB, raw_config, worker_size


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
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(raw_config()))
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
    assert (
        "requests of 1,000 tokens at once: 13,172: num_blocks=210752,num_slots=13172,max_step_tokens=13172\n" in shown
    )
    assert "moved 637,952 bytes, needed 637,952 bytes: ratio 1.00, in 64 parts\n" in shown
    assert run([*words, "--json"]) == EXIT_CLEAN
    told = json.loads(capsys.readouterr().out)
    assert told["handoff"]["num_tokens"] == 8192, "what the model can hold, where that is less than usual"
    assert told["decode"]["size"]["dcp"] == 4
    assert told["decode"]["capacity"]["memory_bytes"] == GIB
    assert run(["plan", "--model", str(SHIPPED_MODEL), "--decode", "tp=3"]) == EXIT_SETTINGS
    assert "--decode tp = 3: divides num_attention_heads (8)" in capsys.readouterr().err


def test_words_that_a_command_does_not_know_are_refused_with_its_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Which says what it does know."""
    with pytest.raises(SystemExit, match=str(EXIT_SETTINGS)):
        run(["plan", "--model", str(SHIPPED_MODEL), "--mixed", "tp=4"])
    told = capsys.readouterr().err
    assert told.startswith("usage: pdmesh plan [-h] --model DIR")
    assert told.endswith("pdmesh plan: error: unrecognized arguments: --mixed tp=4\n")


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
  a draft head of 541,696 parameters beside them

legal cuts
  tp  dcp      KV heads a rank  ranks with the same
  1   1                      2                    1
  2   1                      1                    1
  4   1, 2                   1                    2
  8   1, 2, 4                1                    4
not legal
  dcp 2 at tp 2: must be 1 where no two ranks hold the same KV head
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


def test_a_preset_is_planned_as_it_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures as for its settings by hand; what is given beside it wins."""
    base = ["plan", "--model", str(SHIPPED_MODEL), "--tokens", "100"]
    by_hand = ["--set", "num_speculative_tokens=5", "--set", "mtp_draft_body_tp1=1", "--prefill", "tp=2"]
    shown = []
    for words in (["--preset", "p2d1-mtp5"], by_hand, ["--preset", "p2d1-mtp3", "--set", "num_speculative_tokens=5"]):
        assert run([*base, *words]) == EXIT_CLEAN
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert "up to 5 guesses in a step" in shown[0]
    assert run([*base, "--preset", "p2d1-mtp5", "--decode", "tp=4,dcp=2"]) == EXIT_SETTINGS
    assert "--decode mtp_draft_body_tp1 = 1: " in capsys.readouterr().err


def test_a_model_without_a_draft_head_is_said_to_have_none(tmp_path: Path) -> None:
    """Before anybody asks it to guess."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(raw_config(mtp_num_hidden_layers=0)))
    estimate = estimate_of(EstimateRequest(model=str(tmp_path), prefill="tp=2", decode="tp=2"), {})
    assert render_estimate(estimate).splitlines()[3] == "  no draft head"


def test_tables_say_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word: the model, its cuts, both workers, what fits and what does not, and who sends how much to whom."""
    words = ["--prefill", "tp=1", "--decode", "tp=4,dcp=2,dp=2", "--memory", "4MiB", "--tokens", "100"]
    assert run(["plan", "--model", str(SHIPPED_MODEL), *words]) == EXIT_CLEAN
    assert capsys.readouterr().out == TABLES


def test_memory_without_room_for_a_block_is_told() -> None:
    """The weights fit, and nothing else does; where one request fits and two do not, no settings are missing."""
    config = load_config(SHIPPED_MODEL)
    sizes = worker_size("prefill", 1, dtype=Dtype.FLOAT32), worker_size("decode", 8, 4, dtype=Dtype.FLOAT32)
    weights = rank_weight_bytes(RankShard(config=config, tp_size=8), Dtype.FLOAT32)

    def told(left_bytes: int) -> str:
        return render_estimate(make_estimate(config, *sizes, num_tokens=8192, memory_bytes=weights + left_bytes))

    assert (
        "leave 8.8 KiB behind the weights, for caches and all that computing takes\n  not one block and one state fit\n"
    ) in told(9000)
    assert "  the longest request alone: 1,152 tokens\n  requests of 8,192 tokens at once: 0\n" in told(100_000)
