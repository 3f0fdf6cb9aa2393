"""What a decode worker can be told about pulling, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.runtime.settings import SettingsError, load
from common.worker.configuration import rules_of
from common.worker.core.compatibility import Rule, judge
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


GIVEN: dict[str, tuple[str, object]] = {
    "pull": ("all", "all"),
    "parallel_shard_pull": ("0", False),
    "num_staging_rows": ("3", 3),
}
"""As text, and as JSON has it."""


def read(transfer: Transfer, **places: Any) -> WorkerSettings:
    """Start a decode worker of this transfer with settings from some places."""
    own = f"worker_id=d,model=m,engine=fake,transfer={transfer}{places.pop('spec', '')}"
    return load(
        WorkerSettings, role="decode", spec=own, rules=rules_of(WorkerRole.DECODE), **({"environ": {}} | places)
    ).value


@pytest.mark.parametrize("key", GIVEN)
def test_what_is_set_for_everybody_holds_for_decode_workers_that_pull(key: str, tmp_path: Path) -> None:
    """One that is pushed to passes it over, wherever it is set; addressed to that one or its role it is refused by name."""
    value, content = GIVEN[key]
    files = [tmp_path / "all.json", tmp_path / "role.json"]
    files[0].write_text(json.dumps({key: content}), encoding="utf-8")
    files[1].write_text(json.dumps({"decode": {key: content}}), encoding="utf-8")
    for_all: list[dict[str, Any]] = [
        {"environ": {f"PD_{key.upper()}": value}},
        {"overrides": [f"{key}={value}"]},
        {"config_file": files[0]},
    ]
    for_one: list[dict[str, Any]] = [
        {"environ": {f"PD_DECODE__{key.upper()}": value}},
        {"overrides": [f"decode.{key}={value}"]},
        {"config_file": files[1]},
        {"spec": f",{key}={value}"},
    ]
    pulls = read(Transfer.PULL, **for_one[0])
    for place in for_all:
        assert getattr(read(Transfer.PULL, **place), key) == getattr(pulls, key)
        assert read(Transfer.PUSH, **place).transfer is Transfer.PUSH
    for place in for_one:
        with pytest.raises(SettingsError) as caught:
            read(Transfer.PUSH, **place)
        assert [(problem.key, problem.name) for problem in caught.value.problems] == [(key, Rule.PULL_ONLY)]
    mixed_up = for_all[0] | {"config_file": files[1]}
    assert read(Transfer.PUSH, **mixed_up).transfer is Transfer.PUSH, "the environment counts more than the file"


def test_the_environment_and_a_spec_say_how_to_pull() -> None:
    """PD_PARALLEL_SHARD_PULL is the start value; the keys of a worker's SPEC are the settings' names."""
    loaded = load(
        WorkerSettings,
        role="decode",
        spec="worker_id=d,model=m,transfer=pull,pull=all",
        environ={"PD_PARALLEL_SHARD_PULL": "0"},
    ).value
    assert (loaded.transfer, loaded.pull, loaded.parallel_shard_pull) == (Transfer.PULL, PulledRoles.ALL, False)
