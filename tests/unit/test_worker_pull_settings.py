"""What a decode worker can be told about pulling, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.runtime.settings import load
from common.worker.core.compatibility import judge
from common.worker.settings import PulledRoles, WorkerSettings
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.workers import WorkerRole

STATES = (Role.CONV, Role.SSM)


def settings(**changes: Any) -> WorkerSettings:
    """A worker with 8 slots."""
    return WorkerSettings(worker_id="decode-0", model=Path("fake"), num_slots=8, **changes)


@pytest.mark.parametrize(
    ("changes", "roles", "rows"),
    [
        ({}, (), 0),
        ({"transfer": Transfer.PULL}, STATES, 8),
        ({"transfer": Transfer.PULL, "pull": PulledRoles.ALL}, (Role.KEY, Role.VALUE, *STATES, Role.BOOTSTRAP), 8),
        ({"transfer": Transfer.PULL, "num_staging_rows": 3}, STATES, 3),
    ],
)
def test_what_is_pulled_and_the_rows_for_it(changes: dict[str, Any], roles: tuple[Role, ...], rows: int) -> None:
    """Rows are for states, one a slot unless said otherwise; only a decode worker has any."""
    made = settings(**changes)
    assert made.pulled == roles
    assert [made.staging_rows_of(role) for role in (WorkerRole.DECODE, WorkerRole.PREFILL, WorkerRole.MIXED)] == [
        rows,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("changes", "key", "rule"),
    [
        ({"pull": PulledRoles.ALL}, "pull", "only with transfer=pull; this worker has transfer=push"),
        (
            {"parallel_shard_pull": False},
            "parallel_shard_pull",
            "only with transfer=pull; this worker has transfer=push",
        ),
        ({"num_staging_rows": 2}, "num_staging_rows", "only with transfer=pull; this worker has transfer=push"),
        ({"transfer": Transfer.PULL, "num_staging_rows": 9}, "num_staging_rows", "at most num_slots = 8"),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], key: str, rule: str) -> None:
    """Whoever sets it believes that this worker uses it."""
    (refusal,) = judge(settings(**changes), WorkerRole.DECODE, None).refusals
    assert refusal.key == key
    assert refusal.text.startswith(rule)
    assert (
        judge(settings(**changes), WorkerRole.PREFILL, None).refusals == ()
    )  # set for everybody, it does not concern this one


def test_the_environment_and_a_spec_say_how_to_pull() -> None:
    """PD_PARALLEL_SHARD_PULL is the start value; the keys of a worker's SPEC are the settings' names."""
    loaded = load(
        WorkerSettings,
        role="decode",
        spec="worker_id=d,model=m,transfer=pull,pull=all",
        environ={"PD_PARALLEL_SHARD_PULL": "0"},
    ).value
    assert (loaded.transfer, loaded.pull, loaded.parallel_shard_pull) == (Transfer.PULL, PulledRoles.ALL, False)
