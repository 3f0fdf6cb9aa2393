"""The processes of a mesh by the names of its services, and signals to them that are always taken back."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.e2e.proc import descendants


class Processes:
    """Those below a launcher. What is frozen here is thawed by `thaw_all` at the latest."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._frozen: set[int] = set()

    def service(self, name: str) -> int | None:
        """The process of a service, `nats` among them; None while it does not run."""
        for pid in descendants(self._launcher):
            words = _command(pid)
            if name == "nats" and words[0].endswith(b"nats-server"):
                return pid
            if b"--config" in words and words[-1].endswith(b"/" + name.encode() + b".json"):
                return pid
        return None

    def rank(self, name: str, number: int) -> int | None:
        """A rank process of a worker, counted modulo those that it has; None while there is none."""
        worker = self.service(name)
        if worker is None:
            return None
        servers = [pid for pid in descendants(worker) if any(b"forkserver" in word for word in _command(pid))]
        ranks = sorted(pid for pid in servers if _parent(pid) in servers)
        return ranks[number % len(ranks)] if ranks else None

    def kill(self, pid: int) -> None:
        """SIGKILL."""
        _send(pid, signal.SIGKILL)

    def terminate(self, pid: int) -> None:
        """SIGTERM."""
        _send(pid, signal.SIGTERM)

    def freeze(self, pid: int) -> None:
        """SIGSTOP."""
        self._frozen.add(pid)
        _send(pid, signal.SIGSTOP)

    def thaw(self, pid: int) -> None:
        """SIGCONT, to a process that was frozen here and still is one of the mesh's."""
        if pid in self._frozen and pid in descendants(self._launcher):
            _send(pid, signal.SIGCONT)
        self._frozen.discard(pid)

    def thaw_all(self) -> None:
        """Nothing stays frozen."""
        for pid in tuple(self._frozen):
            self.thaw(pid)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return [b""]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
