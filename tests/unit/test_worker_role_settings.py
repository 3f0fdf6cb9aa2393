"""Settings that only some roles look at: refused where they are given to another role, passed over where they are for everybody."""

from __future__ import annotations

from typing import Any

import pytest

from common.runtime.settings import Loaded, SettingsError, keys_of, load
from common.worker.core.role_settings import ROLES_OF, concerns, misplaced
from common.worker.settings import WorkerSettings
from contracts.workers import WorkerRole

BASE = "worker_id=w0,model=m"


def read(role: WorkerRole, spec: str = "", overrides: tuple[str, ...] = (), **environ: str) -> Loaded[WorkerSettings]:
    """Read a worker's settings as its role does."""
    return load(
        WorkerSettings,
        role=role,
        spec=BASE + spec,
        overrides=overrides,
        environ=environ,
        misplaced=misplaced(role),
    )


def test_every_key_is_a_setting() -> None:
    """A setting that was renamed would be passed over in silence."""
    assert set(ROLES_OF) <= keys_of(WorkerSettings)
    assert all(ROLES_OF.values())


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ({"spec": ",verify_cache=1"}, "verify_cache"),
        ({"overrides": ("prefill.verify_cache=1",)}, "--set prefill.verify_cache"),
        ({"PD_PREFILL__VERIFY_CACHE": "1"}, "PD_PREFILL__VERIFY_CACHE"),
    ],
)
def test_what_is_given_to_one_role_that_does_not_look_at_it_is_refused(given: dict[str, Any], label: str) -> None:
    """By name, with whom it concerns and what to write instead."""
    with pytest.raises(SettingsError) as caught:
        read(WorkerRole.PREFILL, **given)
    (problem,) = caught.value.problems
    assert problem.text == (
        f"{label} = 1: only decode workers look at it; this is a prefill worker\n"
        "    setting_of_another_role: give it to --decode, or leave it out"
    )


def test_what_is_set_for_everybody_reaches_those_whom_it_concerns() -> None:
    """The others pass it over."""
    for role in WorkerRole:
        assert read(role, overrides=("transfer=pull", "mix_batch=0"), PD_VERIFY_CACHE="1").value.verify_cache


def test_all_are_named_at_once() -> None:
    """With the owners of each."""
    with pytest.raises(SettingsError) as caught:
        read(WorkerRole.PREFILL, ",transfer=pull,reserve_output_tokens=5,mix_batch=0")
    rules = {problem.key: problem.rule for problem in caught.value.problems}
    assert rules == {
        "transfer": "only decode workers look at it; this is a prefill worker",
        "reserve_output_tokens": "only decode and mixed workers look at it; this is a prefill worker",
        "mix_batch": "only mixed workers look at it; this is a prefill worker",
    }


@pytest.mark.parametrize("role", WorkerRole)
def test_a_role_takes_what_concerns_it(role: WorkerRole) -> None:
    """Every setting that it looks at may be addressed to it."""
    say = misplaced(role)
    assert {key for key in keys_of(WorkerSettings) if say(key, key, "1") is None} == {
        key for key in keys_of(WorkerSettings) if concerns(key, role)
    }
    assert concerns("tp", role)
