"""The launcher knows the real settings of every service, without their code and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common.runtime.settings import ROLES, keys_of
from services.launcher.settings import settings_structs

_NEEDED = {
    "router": {"model", "nats_url", "host", "port", "expected_workers", "drain_timeout_s"},
    "broker": {"nats_url", "drain_timeout_s"},
    "prefill": {"model", "nats_url", "worker_id", "transport_dir", "drain_timeout_s"},
    "launcher": {"nats_url"},
}


def test_every_role_has_a_struct() -> None:
    """Each role that settings may be addressed to is checked, and has the keys that the launcher fills in."""
    structs = settings_structs()
    assert set(structs.by_role) == set(ROLES)
    for role, keys in _NEEDED.items():
        assert keys <= keys_of(structs.by_role[role])


def test_the_command_loads_no_torch() -> None:
    """The launcher starts in a moment, and runs where there is no torch."""
    program = (
        "import sys\nfrom services.launcher.app import run\nfrom services.launcher.settings import settings_structs\n"
        "settings_structs()\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def _pdmesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "services.launcher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_bad_settings_exit_with_status_two(tmp_path: Path) -> None:
    """Everything wrong is listed, and nothing is started."""
    workers = ("--prefill", "tp=0", "--decode", "tp=1,colour=red", "--set", "nonsense=1")
    result = _pdmesh("up", "--model", str(tmp_path), *workers)
    assert result.returncode == 2
    for start in ("prefill-0: tp = 0", "decode-0: colour = red", "--set nonsense = 1", f"--model = {tmp_path}"):
        assert f"\n  {start}: " in result.stderr
    assert result.stdout == ""


def test_the_effective_settings_can_be_seen(tmp_path: Path) -> None:
    """`--dump` starts nothing."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    result = _pdmesh("up", "--model", str(tmp_path), "--mixed", "tp=2", "--port", "9000", "--dump")
    assert result.returncode == 0, result.stderr
    dump = json.loads(result.stdout)
    assert list(dump) == ["launcher", "broker", "mixed-0", "router"]
    assert dump["router"]["port"] == {"value": 9000, "source": "--port"}
    assert dump["router"]["expected_workers"] == {"value": ["mixed-0"], "source": "launcher"}


def test_a_word_is_no_server() -> None:
    """What is no URL is refused as a setting is, and nobody looks for a host of that name."""
    result = _pdmesh("links", "--nats", "garbage")
    assert result.returncode == 2
    assert "nats_url = garbage: a URL of the form nats://host:port" in result.stderr


def test_a_missing_server_is_told(tmp_path: Path) -> None:
    """Without a NATS server there is nothing to show, and the reason names its address."""
    result = _pdmesh("timeline", "rab-0", "--nats", "nats://127.0.0.1:9")
    assert result.returncode == 1
    assert "nats://127.0.0.1:9" in result.stderr
