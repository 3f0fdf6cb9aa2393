"""Metrics that nobody reads: making and counting real ones would cost as much as the simulation itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from prometheus_client import Counter, Gauge, Histogram

from common.runtime.metrics import LATENCY_BUCKETS, Metrics


class _Nothing:
    """Takes every value of every series."""

    def labels(self, *_values: str, **_named: str) -> _Nothing:
        """Any series."""
        return self

    def inc(self, _amount: float = 1) -> None:
        """Nothing."""

    def dec(self, _amount: float = 1) -> None:
        """Nothing."""

    def set(self, _value: float) -> None:
        """Nothing."""

    def observe(self, _value: float, _exemplar: Any = None) -> None:
        """Nothing."""

    def set_function(self, _function: Callable[[], float]) -> None:
        """Nothing."""

    def remove(self, *_values: str) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Nothing."""


_NOTHING = _Nothing()


class SilentMetrics(Metrics):
    """A registry of nothing."""

    def __init__(self) -> None:
        """Make nothing."""

    def counter(self, _name: str, _text: str, _labels: Sequence[str] = ()) -> Counter:
        """See `Metrics.counter`."""
        return cast("Counter", _NOTHING)

    def gauge(self, _name: str, _text: str, _labels: Sequence[str] = ()) -> Gauge:
        """See `Metrics.gauge`."""
        return cast("Gauge", _NOTHING)

    def histogram(
        self, _name: str, _text: str, _labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """See `Metrics.histogram`."""
        del buckets
        return cast("Histogram", _NOTHING)
