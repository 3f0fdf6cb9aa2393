"""What a bus tells its observer, as Prometheus metrics `pdmesh_bus_*`."""

from common.bus.observer import RequestKind, RequestOutcome
from common.runtime.metrics import Metrics


class BusMetrics:
    """A `BusObserver`. Every series exists from the start, so that a rate over the first one is not lost."""

    def __init__(self, metrics: Metrics) -> None:
        self._disconnects = metrics.counter("bus_disconnects_total", "Losses of the connection to NATS")
        self._reconnects = metrics.counter("bus_reconnects_total", "Returns of the connection to NATS")
        requests = metrics.histogram(
            "bus_request_seconds",
            "Requests by whom they are for and how they ended for the asker",
            ("kind", "outcome"),
        )
        self._publishes_lost = metrics.counter(
            "bus_publishes_lost_total", "Messages refused while disconnected, or lost with the connection"
        )
        self._messages_dropped = metrics.counter(
            "bus_slow_consumer_drops_total", "Messages that arrived and were thrown away because their reader was slow"
        )
        self._events_dropped = metrics.counter(
            "bus_events_dropped_total",
            "Events that were not stored: too many waited, refused, or not sent for too long",
        )
        self._series = {
            (kind, outcome): requests.labels(kind, outcome) for kind in RequestKind for outcome in RequestOutcome
        }

    def disconnected(self) -> None:
        """See `BusObserver.disconnected`."""
        self._disconnects.inc()

    def reconnected(self) -> None:
        """See `BusObserver.reconnected`."""
        self._reconnects.inc()

    def request_ended(self, kind: RequestKind, outcome: RequestOutcome, seconds: float) -> None:
        """See `BusObserver.request_ended`."""
        self._series[kind, outcome].observe(seconds)

    def publishes_lost(self, count: int) -> None:
        """See `BusObserver.publishes_lost`."""
        self._publishes_lost.inc(count)

    def messages_dropped(self, count: int) -> None:
        """See `BusObserver.messages_dropped`."""
        self._messages_dropped.inc(count)

    def events_dropped(self, count: int) -> None:
        """See `BusObserver.events_dropped`."""
        self._events_dropped.inc(count)
