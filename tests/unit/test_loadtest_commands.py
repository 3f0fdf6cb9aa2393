"""The command line, the meshes that it asks for, recall scores, and pushes through the data plane."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from common.layout.shape import CacheShape, LayerType
from common.runtime.clock import SystemClock
from contracts.errors import InvalidValueError
from contracts.manifest import CacheDtypes, Dtype
from loadtest.__main__ import EXIT_SETTINGS, run
from loadtest.arguments import parser
from loadtest.client import Sample
from loadtest.mesh import MeshSpec
from loadtest.push_figures import PushFigures, report_push, sum_of_medians
from loadtest.push_throughput import NUM_SEQUENCES, bench
from loadtest.recall import make_task
from loadtest.recall_run import RecallFigures, meshes_of, report_recall, score, tasks_of
from loadtest.report import EXIT_FAILED, EXIT_GOOD, Machine, Report
from loadtest.settings import SHORT_MEMORY, LoadSettings, MemorySettings, OverlapSettings, RecallSettings
from loadtest.statistics import wilson

T = TypeVar("T")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a checkpoint."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def _load_settings(*argv: str) -> LoadSettings:
    values = vars(parser().parse_args(argv))
    del values["command"], values["json"]
    return LoadSettings(**values)


def _settings(kind: Callable[..., T], *argv: str) -> T:
    values = vars(parser().parse_args(argv))
    del values["command"], values["json"]
    return kind(**{name: tuple(value) if name == "overrides" else value for name, value in values.items()})


def _recall_settings(*argv: str) -> RecallSettings:
    values = vars(parser().parse_args(["recall", *argv]))
    del values["command"], values["json"]
    return RecallSettings(**{**values, "overrides": tuple(values["overrides"])})


def _report() -> Report:
    return Report("x", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))


def test_the_contract_is_the_designs(model: Path) -> None:
    """25 tokens, one at a time, 8 warm-ups, 200 requests in each of 3 rounds, then two at once."""
    settings = _load_settings("contract", "--model", str(model))
    assert (settings.num_output_tokens, settings.concurrency, settings.num_warm_ups) == (25, 1, 8)
    assert (settings.num_requests, settings.num_rounds) == (200, 3)
    assert settings.safety_requests > 0


def test_modes_are_prefill_decode_and_each_mixed_worker(model: Path) -> None:
    """Without flags P2/D1 is compared with mixed workers of both sizes; given SPECs replace them."""
    settings = _load_settings("handoff", "--model", str(model))
    assert [mesh.mode for mesh in settings.meshes] == ["P/D", "mixed tp=2", "mixed tp=1"]
    assert settings.meshes[0].workers == (("prefill", "tp=2"), ("decode", "tp=1"))
    settings = _load_settings("handoff", "--model", str(model), "--mixed", "tp=4", "--mixed", "tp=1")
    assert [mesh.mode for mesh in settings.meshes] == ["P/D", "mixed tp=4", "mixed tp=1"]


def test_a_mesh_is_started_with_the_launchers_own_command(model: Path) -> None:
    """Model, ports, workers and settings are on its command line."""
    spec = MeshSpec(mode="P/D", model=model, workers=(("prefill", "tp=2"), ("decode", "")), overrides=("engine=fake",))
    words = spec.command(port=1, nats_port=2, logs=model)
    assert words[1:5] == ("-P", "-m", "services.launcher", "up")
    assert words[9:13] == ("--prefill", "tp=2", "--decode", "--set")
    assert words[-2:] == ("engine=fake", "--no-restart")


def test_workers_are_called_as_the_launcher_calls_them(model: Path) -> None:
    """By their id, else by role and number."""
    workers = (("decode", "tp=1,id=left"), ("decode", ""), ("prefill", ""), ("decode", "tp=2"))
    spec = MeshSpec(mode="m", model=model, workers=workers)
    assert spec.worker_ids("decode") == ("left", "decode-0", "decode-1")
    assert spec.is_disaggregated()


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["handoff", "--rounds", "0"], "rounds"),
        (["handoff", "--output-tokens", "1"], "output_tokens"),
        (["handoff", "--prompt-tokens", "0"], "prompt_tokens"),
        (["handoff", "--prompt-tokens", "8,8"], "prompt_tokens"),
        (["contract", "--safety-requests", "-1"], "safety_requests"),
        (["contract", "--time-limit", "0"], "time_limit_s"),
        (["contract", "--mixed", "tp=1", "--mixed", "tp=1"], "mixed"),
        (["recall", "--pairs", "3", "--questions", "4"], "pairs"),
        (["recall", "--pairs", "1000"], "pairs"),
        (["recall", "--tasks", "7", "--rounds", "2"], "tasks"),
        (["recall", "--url", "http://x", "--fault", "zero:"], "fault"),
        (["recall", "--fault", "vanish:role=key"], "failpoints"),
        (["overlap", "--prompt-tokens", "8,8"], "prompt_tokens"),
        (["overlap", "--requests", "0"], "requests"),
        (["memory", "--transport", "pigeon"], "transport"),
        (["memory", "--transport", "shm,shm"], "transport"),
        (["memory", "--requests", "70", "--sample-every", "50"], "requests"),
        (["memory", "--output-tokens", "1"], "output_tokens"),
        (["shard-pull", "--latency-ms", "3,3"], "latency_ms"),
        (["shard-pull", "--latency-ms=-1"], "latency_ms"),
        (["shard-pull", "--vocabulary", "-1"], "vocab_size"),
    ],
)
def test_bad_values_end_with_status_2(
    argv: list[str], field: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the field is named."""
    assert run([*argv, "--model", str(model)]) == EXIT_SETTINGS
    assert f"{field}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--sizes", "1MiB,1024KiB"], "sizes"),
        (["--sizes", "0"], "sizes"),
        (["--sizes", "2MiB", "--region", "1MiB", "--pieces", ""], "sizes"),
        (["--pieces", "3KiB"], "pieces"),
        (["--region", "16MiB", "--sizes", "1MiB"], "region"),
        (["--sources", "0"], "sources"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_bad_values_of_the_data_planes_test_end_with_status_2(
    argv: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the field is named."""
    assert run(["dataplane", *argv]) == EXIT_SETTINGS
    assert f"{field}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--keep-ended", "0"], "keep_ended_s"),
        (["--set", "keep_ended_s=3"], "set"),
        (["--in-flight", "4,4"], "in_flight"),
        (["--in-flight", "4", "--handoffs", "3"], "handoffs"),
    ],
)
def test_bad_values_of_the_brokers_test_end_with_status_2(
    argv: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the field is named: what is measured with is not changed behind its back."""
    assert run(["control", *argv]) == EXIT_SETTINGS
    assert f"{field}: " in capsys.readouterr().err


def test_what_is_remembered_on_purpose_is_kept_short_while_memory_is_measured(model: Path) -> None:
    """Each transport has a mesh of its own, and the user's own settings come last."""
    settings = _settings(MemorySettings, "memory", "--model", str(model), "--set", "broker.keep_ended_s=3")
    assert settings.transports == ("shm", "tcp")
    assert settings.mesh("tcp").overrides == ("transport=tcp", *SHORT_MEMORY, "broker.keep_ended_s=3")
    assert (settings.num_requests, settings.num_warm_ups, settings.concurrency) == (2000, 200, 8)


def test_hidden_pushes_are_measured_with_one_rank_a_side(model: Path) -> None:
    """Two lengths, so that what is late can be told from what grows with the prompt."""
    settings = _settings(OverlapSettings, "overlap", "--model", str(model))
    assert settings.mesh.workers == (("prefill", "tp=1"), ("decode", "tp=1"))
    assert settings.prompt_tokens == (1024, 4096)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Before any mesh is started."""
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        _load_settings("handoff", "--model", str(tmp_path))


def test_the_load_test_starts_without_torch() -> None:
    """A client that measures must not carry the engine's threads and start-up time."""
    program = "import sys, loadtest.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_fault_is_planted_in_one_mesh_alone(model: Path) -> None:
    """Both meshes are the same but for the prefill worker's failpoints."""
    healthy, faulty = meshes_of(_recall_settings("--model", str(model), "--fault", "zero:role=key"))
    assert healthy.overrides == ()
    assert faulty.overrides == ("prefill.failpoints=zero:role=key",)
    assert healthy.workers == faulty.workers


def test_tasks_are_held_out_and_repeatable(model: Path) -> None:
    """The same seed gives the same tasks, from the stream that training never saw."""
    settings = _recall_settings("--model", str(model), "--tasks", "5")
    tasks = tasks_of(settings)
    assert tasks == tasks_of(settings)
    assert tasks[0] == make_task(1, num_pairs=24, num_questions=8, split="held-out")


def _answered(place: int, tokens: tuple[int, ...], error: str = "") -> Sample:
    return Sample(
        mode="healthy",
        round=0,
        place=place,
        num_prompt_tokens=1,
        sent_ns=0,
        done_ns=1,
        token_ids=tokens,
        token_ns=(1,) * len(tokens),
        error=error,
    )


def test_answers_are_scored_by_question_and_failures_count_as_wrong() -> None:
    """A right answer, one wrong value, and a request that failed."""
    tasks = [make_task(seed, num_pairs=4, num_questions=2) for seed in range(3)]
    right = tasks[0].answer
    slipped = (*tasks[1].answer[:3], tasks[1].answer[3] + 1)
    samples = [_answered(0, right), _answered(1, slipped), _answered(2, tasks[2].answer, error="worker lost")]
    found = score(
        "faulty", tasks, samples, reference=[_answered(place, task.answer) for place, task in enumerate(tasks)]
    )
    assert (found.num_right, found.num_questions, found.num_errors) == (3, 6, 1)
    assert found.num_unlike_healthy == 1
    assert found.accuracy.share == 0.5


def _figures(mode: str, right: int) -> RecallFigures:
    return RecallFigures(
        mode=mode,
        num_tasks=50,
        num_errors=0,
        num_questions=400,
        num_right=right,
        num_unlike_healthy=0,
        accuracy=wilson(right, 400),
    )


@pytest.mark.parametrize(("faulty", "status"), [(100, EXIT_GOOD), (390, EXIT_FAILED)])
def test_a_planted_fault_must_show(faulty: int, status: int) -> None:
    """A drop beyond both intervals is wanted; a fault that nobody notices fails the run."""
    report = _report()
    report_recall(report, [_figures("healthy", 395), _figures("faulty", faulty)], fault="zero:role=key")
    assert report.status == status
    assert json.loads(report.json())["figures"]["fault"]["drop_points"] == pytest.approx((395 - faulty) / 4)


def test_pushes_move_what_the_plan_says() -> None:
    """Every byte of the request's caches, in order and scattered, over the real data plane."""
    shape = CacheShape(
        layer_types=(LayerType.LINEAR, LayerType.FULL),
        num_kv_heads=2,
        head_dim=8,
        num_key_heads=2,
        num_value_heads=2,
        key_head_dim=8,
        value_head_dim=8,
        conv_kernel=4,
        dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
        block_size=16,
        num_blocks=4 * NUM_SEQUENCES,
        num_slots=NUM_SEQUENCES,
    )
    tokens, conv, ssm = 50 * 2 * 2 * 8 * 4, 3 * 48 * 4, 2 * 8 * 8 * 4
    with bench("small", shape, source_tp=2, destination_tp=1, clock=SystemClock()) as pushes:
        for scattered in (False, True):
            for full_queue in (False, True):
                found = pushes.measure(num_tokens=50, repeats=1, scattered=scattered, full_queue=full_queue)
                assert found.num_bytes == tokens + conv + ssm
                assert found.num_writes == (2 if full_queue else 2 * 2)
                assert min(found.push_gb_per_s, found.memcpy_gb_per_s, found.ratio, found.write_ratio) > 0


def test_each_write_counts_by_its_own_median() -> None:
    """One slow repetition of one write does not show."""
    assert sum_of_medians([[1, 10], [1, 10], [900, 10]]) == 11


def test_push_figures_have_an_aim_each() -> None:
    """Below nine tenths of memcpy it is missed."""
    figures = PushFigures(
        shape="s",
        blocks="in order",
        queue="full",
        num_bytes=1,
        num_writes=1,
        num_runs=1,
        push_gb_per_s=1.0,
        write_gb_per_s=1.0,
        memcpy_gb_per_s=1.0,
        ratio=0.95,
        write_ratio=0.97,
        overhead_us_per_write=1.0,
        bind_ms=1.0,
    )
    report = _report()
    report_push(report, [figures, msgspec.structs.replace(figures, blocks="scattered", ratio=0.5)])
    assert [each["met"] for each in json.loads(report.json())["aims"]] == [True, False]
