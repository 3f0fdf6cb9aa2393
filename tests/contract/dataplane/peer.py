"""A second process with a data plane of its own, that a test can freeze, wake and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from common.dataplane.port import Region, WriteGrant
from contracts.dataplane import RegionDescriptor

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
LENGTH = 4 << 20
CONTENT = 0x55
GRANT = WriteGrant(lock_cell=3, cells=(0, 3), generation=1, secret=bytes(range(16)))


class Peer:
    """Starts `peer_process`, gives it commands, and reads its answers."""

    def __init__(self, transport: str, directory: Path) -> None:
        command = [sys.executable, "-m", "tests.contract.dataplane.peer_process", transport, os.fspath(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.commands: IO[str] = self.process.stdin
        self.answers: IO[str] = self.process.stdout
        self.descriptor = msgspec.json.decode(self.answers.readline(), type=RegionDescriptor)

    def say(self, command: str) -> None:
        """Give a command."""
        self.commands.write(f"{command}\n")
        self.commands.flush()

    def ask(self, command: str) -> str:
        """Give a command and wait for its answer."""
        self.say(command)
        return self.answers.readline().strip()

    def connect(self, region: Region) -> None:
        """Let it reach a region of this process, and grant it to it."""
        region.open_grant(GRANT)
        assert self.ask(f"connect {msgspec.json.encode(region.descriptor).decode()}") == "connected"

    def freeze(self) -> None:
        """Stop all of its threads, and return when they have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it and its pipes."""
        if self.process.poll() is None:
            self.kill()
        self.commands.close()
        self.answers.close()
