"""Settings of a worker, judged: what its role, its switches and its checkpoint's heads allow together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.engine.fake.model import FakeModel
from common.engine.model.config import load_config
from common.runtime.settings import Loaded, SettingsProblem, load_from_arguments
from common.worker.core.compatibility import Cuttable, Refusal, Verdict, judge
from common.worker.core.role_settings import misplaced
from common.worker.settings import EngineKind, WorkerSettings
from contracts.errors import InvalidValueError
from contracts.workers import WorkerRole

Rules = Callable[[WorkerSettings], Sequence[SettingsProblem]]


def judge_worker(settings: WorkerSettings, role: WorkerRole) -> Verdict:
    """Judge settings against the model that they name. A checkpoint that cannot be read is left to the ranks, which check more of it."""
    return judge(settings, role, _model_of(settings))


def rules_of(role: WorkerRole) -> Rules:
    """What `common.runtime.settings.load` is to check of a worker of `role`."""
    return lambda settings: problems_of(judge_worker(settings, role))


def problems_of(verdict: Verdict) -> list[SettingsProblem]:
    """The refusals as what is wrong with settings."""
    return [_problem(refusal) for refusal in verdict.refusals]


def load_worker_settings(role: WorkerRole, argv: Sequence[str]) -> Loaded[WorkerSettings]:
    """Read a worker's settings from its command line and environment. Raises `SettingsError` for what it may not start with."""
    return load_from_arguments(WorkerSettings, role=role, argv=argv, rules=rules_of(role), misplaced=misplaced(role))


def _model_of(settings: WorkerSettings) -> Cuttable | None:
    if settings.engine is EngineKind.FAKE:
        return FakeModel()
    try:
        return load_config(settings.model)
    except InvalidValueError:
        return None


def _problem(refusal: Refusal) -> SettingsProblem:
    return SettingsProblem(
        key=refusal.key,
        value=refusal.value,
        rule=refusal.text,
        name=refusal.rule,
        remedy=refusal.remedy,
        addressed_only=refusal.addressed_only,
    )
