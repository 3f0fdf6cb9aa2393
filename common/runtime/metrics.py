"""Metrics of one process, in the format that Prometheus scrapes.

Names begin with `pdmesh_`, are in base units (`_seconds`, `_bytes`), and counters end with `_total`. Labels take few values,
and never that of one request. `docs/metrics.md` lists them all.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

LATENCY_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PHASE_BUCKETS: Final = (0.0001, 0.00025, 0.0005, *LATENCY_BUCKETS, 120.0, 300.0, 600.0)
"""From a tenth of a millisecond to the longest request."""
TOKEN_BUCKETS: Final = tuple(float(1 << power) for power in range(18))
"""1 to 131,072 tokens."""

M = TypeVar("M", Counter, Gauge, Histogram)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each of the others, only to say since when

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_WRONG_UNITS: Final = ("_ms", "_us", "_milliseconds", "_microseconds", "_kb", "_mb", "_gb", "_percent")


class MetricRow(NamedTuple):
    """What is known of a metric before it has any value. `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """The registry of one process. Two of them in one process do not meet.

    Whoever asks for a metric that exists already gets the same one: parts of a service may end and begin again.
    """

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rows: list[MetricRow] = []
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        ProcessCollector(registry=self._registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Count what only grows. The name ends with `_total`."""
        if not name.endswith("_total"):
            raise ValueError(f"{name}: the rule is: the name of a counter ends with _total")
        full = self._described(name, "counter", labels, text)
        return self._once(full, lambda: Counter(full, text, labels, registry=self._registry), Counter)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Show what goes up and down."""
        full = self._described(name, "gauge", labels, text)
        return self._once(full, lambda: Gauge(full, text, labels, registry=self._registry), Gauge)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """Show how something is spread, seconds by default."""
        full = self._described(name, "histogram", labels, text)
        return self._once(
            full, lambda: Histogram(full, text, labels, buckets=buckets, registry=self._registry), Histogram
        )

    @property
    def described(self) -> tuple[MetricRow, ...]:
        """Every metric of ours, in the order of registration."""
        return tuple(self._rows)

    def _described(self, name: str, kind: str, labels: Sequence[str], text: str) -> str:
        full = _full(name)
        if not text:
            raise ValueError(f"{name}: the rule is: a metric has a text that says what it means")
        row = MetricRow(full, kind, tuple(labels), text)
        if full not in self._made:
            self._rows.append(row)
        elif row not in self._rows:
            raise ValueError(f"{name}: the rule is: whoever asks for a metric again describes it as before")
        return full

    def _once(self, full: str, make: Callable[[], M], kind: type[M]) -> M:
        """Make a metric, or return the one that was made before."""
        if full not in self._made:
            self._made[full] = make()
        made = self._made[full]
        if not isinstance(made, kind):
            raise TypeError(f"{full} is no {kind.__name__}")
        return made

    def exposition(self) -> bytes:
        """Everything, as the body of an answer of `content_type`."""
        return generate_latest(self._registry)


def _full(name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("pdmesh") or name.endswith(_WRONG_UNITS):
        raise ValueError(f"{name}: the rule is: snake_case in base units, without the prefix pdmesh_")
    return f"pdmesh_{name}"
