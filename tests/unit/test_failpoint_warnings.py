"""Planted faults are never silent: the worker's log and the launcher name them."""

from __future__ import annotations

from pathlib import Path

import structlog
from structlog.testing import capture_logs

from common.worker.app import warn_of_failpoints
from common.worker.settings import WorkerSettings
from services.launcher.app import planted_faults
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.plan import MeshRequest, make_plan
from services.launcher.settings import settings_structs

FAULT = "zero:role=ssm,source=1"


def test_a_worker_warns_of_its_failpoints() -> None:
    """The line names them; a worker without any has none."""
    with capture_logs() as lines:
        warn_of_failpoints(WorkerSettings(model=Path("m"), worker_id="prefill-0"), structlog.get_logger())
        assert lines == []
        warn_of_failpoints(
            WorkerSettings(model=Path("m"), worker_id="prefill-0", failpoints=FAULT), structlog.get_logger()
        )
    assert lines == [{"event": "failpoints_planted", "failpoints": FAULT, "log_level": "warning"}]


def test_the_launcher_names_the_workers_with_failpoints() -> None:
    """Whoever starts a mesh is told which of its workers spoil their transfers, and how."""
    request = MeshRequest(
        model=str(SHIPPED_MODEL),
        workers=(("prefill", ""), ("decode", "")),
        overrides=(f"prefill.failpoints={FAULT}",),
    )
    told = list(planted_faults(make_plan(request, settings_structs(), {})))
    assert told == [f"prefill-0 plants faults on purpose (failpoints): {FAULT}"]
