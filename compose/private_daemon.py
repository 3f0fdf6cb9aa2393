"""A docker daemon of our own, for machines that have the programs but no daemon: it runs for one test, and leaves no trace.

A dockerd that stops leaves its bridge, a mounted network namespace, its packet filter rules with FORWARD on DROP, and IP
forwarding switched on. What was there before is noted first and put back at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.problem import ComposeError
from compose.shell import run, succeeds

PACKAGES: Final = ("docker.io", "iptables", "debootstrap")
"""What a Debian machine needs for it."""

_PROGRAMS: Final = ("dockerd", "docker", "iptables", "iptables-save", "iptables-restore", "ip", "umount")
_FORWARDING: Final = Path("/proc/sys/net/ipv4/ip_forward")
_BRIDGE: Final = "docker0"
_TABLES: Final = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}
_START_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 60.0


def missing_for_private_daemon() -> str:
    """Why this machine cannot run a daemon of our own; empty if it can."""
    if os.geteuid() != 0:
        return "only root can start one"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (on Debian: apt-get install {' '.join(PACKAGES)})"
    if (Path("/sys/class/net") / _BRIDGE).exists():
        return f"another daemon's bridge {_BRIDGE} exists"
    return ""


@contextlib.contextmanager
def private_daemon(data_root: Path) -> Iterator[str]:
    """Run a daemon that keeps images in `data_root`, and give its DOCKER_HOST. Afterwards the network is as before."""
    reason = missing_for_private_daemon()
    if reason:
        raise ComposeError(f"no docker daemon answers, and none can be started here: {reason}")
    data_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _network_put_back(), tempfile.TemporaryDirectory(prefix="pdd-", ignore_cleanup_errors=True) as made:
        place = Path(made)
        log_path = data_root / "dockerd.log"
        host = f"unix://{place / 'docker.sock'}"
        command = ["dockerd", "--data-root", str(data_root), "--exec-root", str(place / "exec"), "-H", host]
        command += ["--pidfile", str(place / "docker.pid"), "--mtu", str(_smallest_mtu())]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            _await_answer(process, host, log_path)
            yield host
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _unmount_below(place)


def _await_answer(process: subprocess.Popen[bytes], host: str, log_path: Path) -> None:
    started = time.perf_counter()
    while not succeeds(["docker", "-H", host, "version"]):
        status = process.poll()
        if status is not None or time.perf_counter() - started > _START_TIMEOUT_S:
            last = log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise ComposeError(f"dockerd did not start (status {status}):\n{last}")
        time.sleep(0.1)


def _smallest_mtu() -> int:
    """Containers that send larger packets than the host's own interfaces carry would hang in a download."""
    mtus = [int((folder / "mtu").read_text(encoding="ascii")) for folder in Path("/sys/class/net").iterdir()]
    return min([mtu for mtu in mtus if mtu >= 576], default=1500)


@contextlib.contextmanager
def _network_put_back() -> Iterator[None]:
    forwarding = _FORWARDING.read_text(encoding="ascii")
    rules = {table: run(["iptables-save", "-t", table]) for table in _TABLES}
    try:
        yield
    finally:
        for table, saved in rules.items():
            run(["iptables-restore", "-T", table], stdin=saved if "*" in saved else _open_table(table))
        _FORWARDING.write_text(forwarding, encoding="ascii")
        if (Path("/sys/class/net") / _BRIDGE).exists():
            run(["ip", "link", "delete", _BRIDGE])


def _open_table(table: str) -> str:
    """A table without rules: what a machine has on which nobody filters."""
    chains = "".join(f":{chain} ACCEPT [0:0]\n" for chain in _TABLES[table])
    return f"*{table}\n{chains}COMMIT\n"


def _unmount_below(place: Path) -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    for mounted in sorted((each for each in mounts if each.startswith(f"{place}/")), reverse=True):
        succeeds(["umount", "-l", mounted])
