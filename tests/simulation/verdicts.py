"""What a simulation has seen: broken invariants, how many things of each kind happened, and a trace to read."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from common.runtime.clock import Clock
from contracts.errors import ErrorCode
from tests.simulation.coverage import Pair

_NEVER: Final = frozenset(
    {
        "answer_too_large",
        "cache_corrupt",
        "cancel_failed",
        "effect_dropped",
        "effect_failed",
        "generation_crashed",
        "handoff_record_unreadable",
        "message_refused",
        "orphans_failed",
        "report_dropped",
        "request_failed",
        "task_failed",
    }
)
"""Log lines that tell of a mistake of ours, whatever the faults."""
_CORRUPT: Final = "cache_corrupt"
"""Tells of a mistake, too, but of a handoff whose cache was `corrupted`."""
_REFUSED: Final = "message_refused"
"""Tells of a mistake, but for a handoff that went with the store: the next broker cannot know of it."""
_WIPED: Final = "fault:wipe"
_MAX_VIOLATIONS: Final = 6


class Verdicts:
    """Filled while a simulation runs. With `traced` every line is kept, otherwise only violations."""

    def __init__(self, *, traced: bool = False) -> None:
        self.violations: list[str] = []
        self.seen: Counter[str] = Counter()
        self.pairs: set[Pair] = set()
        self.lines: list[str] = []
        self._traced = traced
        self.clock: Clock | None = None
        self.corrupted: set[str] = set()
        """Handoffs whose cache is not, byte for byte, what was computed: nobody who looks may begin with one."""
        self.corrupts = True
        """Whether another one may be."""
        self.closed = False
        """Whether everything after this is only the end of the simulation itself."""

    def broken(self, invariant: str, text: str) -> None:
        """An invariant does not hold."""
        if self.closed:
            return
        if len(self.violations) < _MAX_VIOLATIONS:
            now = 0.0 if self.clock is None else self.clock.monotonic()
            self.violations.append(f"{invariant} at {now:.4f} s: {text}")
        self.say("VIOLATION", f"{invariant}: {text}")

    def saw(self, what: str) -> None:
        """Something of a kind happened."""
        self.seen[what] += 1

    def say(self, who: str, text: str) -> None:
        """A line of the trace."""
        if self._traced:
            now = 0.0 if self.clock is None else self.clock.monotonic()
            self.lines.append(f"{now:10.4f}  {who:<14} {text}")

    def log(self, process: str) -> SimulatedLog:
        """What a process logs to."""
        return SimulatedLog(self, process)

    @property
    def is_traced(self) -> bool:
        """Whether anybody will read the trace."""
        return self._traced


class SimulatedLog:
    """A `common.runtime.lifecycle.Log`."""

    def __init__(self, verdicts: Verdicts, process: str) -> None:
        self._verdicts = verdicts
        self._process = process

    def info(self, event: str, **fields: Any) -> None:
        """See `Log.info`."""
        self._verdicts.saw(event)
        if self._verdicts.is_traced:
            self._verdicts.say(self._process, f"{event} {_shown(fields)}")

    def error(self, event: str, **fields: Any) -> None:
        """See `Log.error`."""
        self.info(event, **fields)
        if event in _NEVER and not self._is_owed(event, fields):
            self._verdicts.broken("no mistakes", f"{self._process} logged {event}: {_shown(fields)}")

    def _is_owed(self, event: str, fields: dict[str, Any]) -> bool:
        if event == _CORRUPT:
            return fields["handoff_id"] in self._verdicts.corrupted
        is_unknown = event == _REFUSED and fields.get("error_code") == ErrorCode.UNKNOWN_HANDOFF
        return is_unknown and bool(self._verdicts.seen[_WIPED])

    warning = error


def _shown(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items() if key != "exc_info")
