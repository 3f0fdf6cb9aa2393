"""Values that a service would only fail on later, with a traceback, are refused as settings, by the name of their key."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.engine.model.config import load_config
from common.runtime.settings import SettingsError, load_from_arguments
from common.worker.settings import WorkerSettings
from contracts.errors import InvalidValueError
from services.broker.settings import BrokerSettings
from services.router.settings import RouterSettings

WORKER = ["--set", "worker_id=decode-0", "--set", "model=/nowhere"]


@pytest.mark.parametrize(
    ("kind", "role", "needed"),
    [(WorkerSettings, "decode", WORKER), (BrokerSettings, "broker", []), (RouterSettings, "router", WORKER[2:])],
)
def test_a_log_level_that_there_is_not_is_refused_with_the_settings(
    kind: type[msgspec.Struct], role: str, needed: list[str]
) -> None:
    """Before, each process died of it with a traceback."""
    loaded: Any = load_from_arguments(kind, role=role, argv=[*needed, "--set", "log_level=debug"]).value
    assert loaded.log_level == "debug"
    with pytest.raises(Exception, match="log_level = loud"):
        load_from_arguments(kind, role=role, argv=[*needed, "--set", "log_level=loud"])


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_there_is_not_is_refused_with_the_settings(port: str) -> None:
    """The worker's own port has the same rule as the others."""
    with pytest.raises(Exception, match=f"admin_port = {port}"):
        load_from_arguments(WorkerSettings, role="decode", argv=[*WORKER, "--set", f"admin_port={port}"])


def test_collectives_that_no_process_can_join_are_refused_with_the_settings() -> None:
    """A group of threads is for tests: a worker's ranks are processes, which would only refuse it after their start."""
    loaded = load_from_arguments(WorkerSettings, role="decode", argv=[*WORKER, "--set", "collectives=gloo"]).value
    assert loaded.collectives == "gloo"
    with pytest.raises(SettingsError, match="collectives = threads: one of shared_memory, gloo"):
        load_from_arguments(WorkerSettings, role="decode", argv=[*WORKER, "--set", "collectives=threads"])


def test_failpoints_that_mean_nothing_are_refused_with_the_settings() -> None:
    """The ranks would only refuse them after their start; all that is wrong is told at once, and the item that is."""
    good = "link:ms=1"
    loaded = load_from_arguments(WorkerSettings, role="decode", argv=[*WORKER, "--set", f"failpoints={good}"]).value
    assert loaded.failpoints == good
    bad = ["--set", "worker_id=Decode 0", "--set", "model=/nowhere", "--set", f"failpoints={good};explode:layer=1"]
    with pytest.raises(SettingsError, match=r"failpoints = explode:layer=1: begins with one of zero") as caught:
        load_from_arguments(WorkerSettings, role="decode", argv=bad)
    assert {problem.key for problem in caught.value.problems} == {"worker_id", "failpoints"}


def test_a_configuration_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    """The file is named, as for any other text that is no configuration."""
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidValueError, match=r"config\.json"):
        load_config(tmp_path)
