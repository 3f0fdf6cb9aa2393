"""What reading from a source is like in a simulation: it takes time, fails in bad weather, and when the source takes its memory back."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from common.engine.fake.pull import FakeReads
from contracts.rank_pull import PullShards
from tests.simulation.plane import Plane

PULL: Final[ContextVar[PullShards | None]] = ContextVar("pull", default=None)
"""The pull whose shards are being read in this context."""


class _Times(dict[int, float]):
    """Seconds that the next shard takes."""

    def __init__(self, plane: Plane) -> None:
        super().__init__()
        self._plane = plane

    def get(self, _source: int, _default: Any = None) -> Any:
        """See `FakeReads.read_s`."""
        pull = PULL.get()
        return 0.0 if pull is None else self._plane.read_seconds(pull.source)


class _Failures(dict[int, str]):
    """Why the shard that has taken its time was not read."""

    def __init__(self, plane: Plane) -> None:
        super().__init__()
        self._plane = plane

    def get(self, _source: int, _default: Any = None) -> Any:
        """See `FakeReads.failures`."""
        pull = PULL.get()
        return "" if pull is None else self._plane.why_unread(pull.source)


class SimulatedReads(FakeReads):
    """See `FakeReads`; what it says comes from the data plane."""

    def __init__(self, plane: Plane) -> None:
        super().__init__()
        self.__dict__["read_s"] = _Times(plane)
        self.__dict__["failures"] = _Failures(plane)
        self.merge_s = 0.0005
