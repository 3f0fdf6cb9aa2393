"""One child process: started tied to this one, with its output in a log, ended politely and then for certain."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from services.launcher import tether

_TAIL_BYTES: Final = 32 * 1024
_KILL_WAIT_S: Final = 10.0


def _nothing() -> None:
    """Most children can be started again as they are."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `stage` orders the stop: 0 first. `drain_s` is how long it may take to end after SIGTERM.

    `before_restart` is called before it is started once more; it may raise OSError.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    log: Path
    stage: int
    drain_s: float
    role: str = ""
    before_restart: Callable[[], None] = _nothing


class Child:
    """A running child. It has a session of its own, so that Ctrl-C in a terminal reaches the launcher alone."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, *, log_begin: int = 0) -> None:
        self.spec = spec
        self._process = process
        self._log_begin = log_begin

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Start it. Raises OSError if its log cannot be written."""
        launcher = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()))
        with spec.log.open("ab") as log:
            begin = log.tell()
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(spec.environ),
                start_new_session=True,
            )
        return cls(spec, process, log_begin=begin)

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    def last_lines(self, num_lines: int = 20) -> Sequence[str]:
        """The last lines of its log, of those that were written since it was started."""
        return tail(self.spec.log, num_lines, begin=self._log_begin)

    async def wait(self) -> int:
        """Return the exit status once it has ended."""
        return await self._process.wait()

    async def stop(self, *, drain: bool = True, limit_s: float = math.inf) -> bool:
        """End it and all that it started; return whether it went by itself with status 0. Twice is fine.

        It has its own time to drain, `limit_s` at most.
        """
        if drain and self.status is None:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self.spec.drain_s, limit_s)):
                    await self._process.wait()
        clean = self.status == 0
        self.kill()
        async with asyncio.timeout(_KILL_WAIT_S):
            await self._process.wait()
        return clean

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once, with its group: ranks and other grandchildren may outlive it for a moment."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def tail(log: Path, num_lines: int = 20, *, begin: int = 0) -> Sequence[str]:
    """The last lines of a log, of those behind its first `begin` bytes; none if there is no such file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    return text.splitlines()[-num_lines:]
