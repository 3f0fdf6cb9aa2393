"""What a worker's own start says of its switches: refusals on standard error, warnings once in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.runtime.lifecycle import EXIT_SETTINGS
from common.worker.app import run_worker, tell
from common.worker.configuration import judge_worker, load_worker_settings
from common.worker.settings import WorkerSettings
from contracts.workers import WorkerRole
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.mark.parametrize(
    ("kind", "spec", "rule"),
    [
        (PrefillService, "tp=4,dcp=2", "dcp_where_tokens_are_generated"),
        (DecodeService, "tp=2,dcp=2", "dcp_ranks_hold_one_kv_head"),
        (MixedService, "tp=4,dcp=2", "dcp_chunked_prefill_is_experimental"),
        (DecodeService, "tp=4,dcp=2,dcp_interleave=8", "interleave_is_one_block"),
        (DecodeService, "tp=4,dcp=2,layerwise_kv_sharding=1", "no_layerwise_kv_sharding"),
        (DecodeService, "tp=3", "tp_cuts_the_model"),
    ],
)
def test_a_start_that_is_not_allowed_ends_with_the_rule(
    kind: Any, spec: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, before any rank begins; the rule's name and what to change are told."""
    assert run_worker(kind, [f"worker_id=w,model={TINY},{spec}"]) == EXIT_SETTINGS
    told = capsys.readouterr().err
    assert f"    {rule}: " in told
    assert rule in {refusal.rule for refusal in judge_worker(_settings(spec), kind.role).refusals}


def test_what_is_experimental_is_warned_of_once_with_the_way_back() -> None:
    """One line a start, however many replicas; settings without effect are told as what they come to."""
    spec = "tp=4,dcp=2,dp=2,experimental_dcp_chunked_prefill=1"
    made = load_worker_settings(WorkerRole.MIXED, [f"worker_id=w,model={TINY},{spec}"]).value
    with capture_logs() as lines:
        tell(judge_worker(made, WorkerRole.MIXED), structlog.get_logger())
    (warning,) = [line for line in lines if line["log_level"] == "warning"]
    assert warning["event"] == "dcp_chunked_prefill_not_bitwise"
    assert "dcp=1 bit for bit" in warning["reason"]
    assert warning["remedy"] == "to roll back set chunked_prefill=0, or dcp=1"
    resolved = {line["key"]: line["effective"] for line in lines if line["event"] == "setting_resolved"}
    assert resolved == {"dcp_interleave": 16, "mix_batch": False}


def test_an_ordinary_start_says_nothing() -> None:
    """Defaults are what they seem."""
    with capture_logs() as lines:
        tell(judge_worker(_settings("tp=2"), WorkerRole.MIXED), structlog.get_logger())
    assert lines == []


def _settings(spec: str) -> WorkerSettings:
    values: dict[str, Any] = dict(part.split("=") for part in spec.split(","))
    numbers = {key: bool(int(text)) if key.startswith("layer") else int(text) for key, text in values.items()}
    return WorkerSettings(worker_id="w", model=TINY, **numbers)  # type: ignore[arg-type]  # whatever the spec names
