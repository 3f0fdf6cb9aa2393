"""What people see: results on standard output, progress with the seconds since the start on standard error."""

from __future__ import annotations

import sys
from typing import TextIO

from common.runtime.clock import Clock


class Console:
    """Writes at once, whatever standard output is connected to."""

    def __init__(self, clock: Clock, *, out: TextIO | None = None, progress: TextIO | None = None) -> None:
        self.clock = clock
        self._start = clock.monotonic()
        self._out = sys.stdout if out is None else out
        self._progress = sys.stderr if progress is None else progress

    def say(self, text: str) -> None:
        """One step of progress."""
        print(f"[{self.clock.monotonic() - self._start:6.1f} s] {text}", file=self._progress, flush=True)

    def refuse(self, text: str) -> None:
        """Why nothing was begun: there is no start yet whose seconds would say anything."""
        print(f"pdmesh: {text}", file=self._progress, flush=True)

    def show(self, text: str, *, end: str = "\n") -> None:
        """A result, or a piece of one."""
        print(text, end=end, file=self._out, flush=True)
