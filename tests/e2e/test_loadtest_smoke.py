"""The load test against real meshes: launcher, NATS, router, broker and workers as processes, with engines that only pretend."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 240
_CONFIG = {"model_type": "qwen3_5_text", "vocab_size": 2304, "max_position_embeddings": 8192, "eos_token_id": 2042}
_SMALL = ("--requests", "2", "--rounds", "2", "--warm-ups", "1", "--prompt-tokens", "8", "--output-tokens", "5")
_FAKE = ("--set", "engine=fake", "--vocabulary", "1024", "--mixed", "tp=1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a mesh of engines that only pretend needs of a checkpoint: no weights."""
    shutil.copy(_ROOT / "models" / "tiny" / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return tmp_path


def _run(model: Path, *argv: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run a command of the load test on a mesh of `model`; return how it ended, and its figures."""
    return _command(model, *argv, "--model", str(model))


def _command(folder: Path, *argv: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run any command of the load test; return how it ended, and its figures, which it leaves in `folder`."""
    file = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "loadtest", *argv, "--json", str(file)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done, json.loads(file.read_bytes()) if file.exists() else None


def test_the_contract_runs_through_real_meshes_and_compares_their_answers(model: Path) -> None:
    """Two meshes, rounds in turn, then two at once: every answer is equal, and the stream tells of every handoff."""
    done, told = _run(model, "contract", *_SMALL, *_FAKE, "--safety-requests", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = told["figures"]
    (one_at_a_time,), (two_at_once,) = (figures["ratios"][kind] for kind in ("8 tokens", "8 tokens, two at once"))
    assert (one_at_a_time["num_equal"], one_at_a_time["num_compared"]) == (4, 4)
    assert (two_at_once["num_equal"], two_at_once["num_compared"]) == (3, 3)
    assert figures["handoff_gap"]["8 tokens"]["num_handoffs"] == 4
    assert {"reserve: rpc", "compute", "ledger close", "handoff gap"} <= set(figures["phases"]["8 tokens"]["P/D"])
    assert "times as the client sees them" in done.stdout


def test_data_planes_are_compared_between_processes(tmp_path: Path) -> None:
    """Two sources at once, every way, a size for each table; what arrives is looked at, or the command would fail."""
    small = ("--sizes", "64KiB", "--pieces", "", "--region", "1MiB", "--block", "256KiB", "--rounds", "2")
    done, figures = _command(tmp_path, "dataplane", *small, "--sources", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    told = figures["figures"]["transfers"]
    seen = {(each["method"], each["nbytes"], each["num_sources"]) for each in told}
    ways = ("memcpy", "shm", "socket", "tcp")
    assert seen >= {(way, nbytes, 2) for way in ways for nbytes in (64, 65536)}
    assert min(each["cpu_s_per_gb"] for each in told) >= 0
    assert min(each["rate"][0] for each in told) > 0


def test_hidden_push_time_is_read_from_a_mesh(model: Path) -> None:
    """Every handoff is told of, with its pushes; what is hidden is a share."""
    small = ("--requests", "2", "--rounds", "2", "--warm-ups", "1", "--prompt-tokens", "8,40")
    done, told = _run(model, "overlap", *small, "--set", "engine=fake", "--vocabulary", "1024")
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("8 tokens", "40 tokens"):
        found = told["figures"]["overlap"][kind]
        assert found["num_handoffs"] == 4
        assert 0 <= found["hidden"] <= 1


def test_pulls_and_pushes_are_compared_on_meshes(model: Path) -> None:
    """Serial, side by side and pushed, each as its handoffs' events say, with what a pull waits and merges for each role."""
    small = ("--requests", "2", "--rounds", "1", "--warm-ups", "0", "--prompt-tokens", "8", "--latency-ms", "0")
    done, told = _run(model, "shard-pull", *small, "--prefill", "tp=2", "--set", "engine=fake", "--vocabulary", "1024")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = told["figures"]["shard_pull"]["prefill tp=2, decode tp=1"]
    ways = {each["mode"]: each["parallel"] for each in figures}
    assert ways == {"pull, serial": False, "pull, parallel": True, "push": None}
    for each in figures:
        pulls = each["parallel"] is not None
        assert each["restore"]["count"] == each["ttft"]["count"] == 2
        assert {role: merge["count"] for role, merge in each["merges"].items()} == (
            {"conv": 2, "ssm": 2} if pulls else {}
        )
        for name in ("wait", "pull"):
            assert (each[name] or {}).get("count") == (2 if pulls else None)
    assert told["aims"] == []  # it is made for links with a latency
    assert "merge conv p50" in done.stdout


def test_a_broker_is_loaded_alone(tmp_path: Path) -> None:
    """At each number in flight: its rate, what it adds to the bare messages, and what it holds; nothing is judged by so few."""
    done, told = _command(tmp_path, "control", "--in-flight", "1,4", "--handoffs", "20", "--keep-ended", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    levels = told["figures"]["control"]
    assert [(each["num_in_flight"], each["num_handoffs"], each["whole"]["count"]) for each in levels] == [
        (1, 20, 20),
        (4, 20, 20),
    ]
    for each in levels:
        assert min(each["rate"], each["bus_alone"]["p50"], each["bytes_before"], each["bytes_after"]) > 0
        assert 0 <= each["num_held"] <= 20
        assert each["bytes_at_peak"] >= each["bytes_before"]
    assert {each["aim"] for each in told["aims"]} == {
        "handoffs/s through one broker",
        "memory of the broker stays flat",
    }


@pytest.mark.long
def test_memory_of_every_process_of_a_mesh_is_looked_at(model: Path) -> None:
    """Before the requests and after each block of them, over tcp as over shared memory."""
    small = (
        "--requests",
        "8",
        "--sample-every",
        "4",
        "--warm-ups",
        "2",
        "--warm-up-seconds",
        "0.1",
        "--transport",
        "shm",
    )
    done, told = _run(model, "memory", *small, "--set", "engine=fake", "--vocabulary", "1024")
    assert done.returncode == 0, done.stdout + done.stderr
    processes = {each["name"]: each for each in told["figures"]["memory"]["shm"]}
    assert {"launcher", "nats", "broker", "router", "prefill-0", "decode-0"} <= processes.keys()
    assert {len(each["seen"]) for each in processes.values()} == {3}
    assert min(each["own"]["level"] for each in processes.values()) > 0


def test_a_mesh_that_cannot_start_is_told_with_the_end_of_its_output(model: Path) -> None:
    """The launcher's own words are shown, and the status says that it failed."""
    done, told = _run(model, "contract", *_SMALL, "--set", "engine=imaginary")
    assert (done.returncode, told) == (1, None)
    assert "the mesh P/D ended with status 2" in done.stderr
    assert "imaginary" in done.stderr
