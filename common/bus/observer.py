"""Who wants to count what happens on a bus: a port of its own, so that the adapters know no metrics library."""

from enum import StrEnum
from typing import Protocol


class RequestKind(StrEnum):
    """Whom a request is for."""

    PEER = "peer"
    """Another process of the mesh."""
    STORE = "store"
    """The server's own buckets and streams."""


class RequestOutcome(StrEnum):
    """How a request ended for the one who asked."""

    ANSWERED = "answered"
    NO_RESPONDERS = "no_responders"
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"
    """There was no connection, or it broke before the answer."""
    CANCELLED = "cancelled"
    """Whoever asked stopped waiting."""


class BusObserver(Protocol):
    """Hears of one connection. Called on the event loop: its methods return at once and never raise."""

    def disconnected(self) -> None:
        """Note that the connection was lost."""
        ...

    def reconnected(self) -> None:
        """Note that it came back."""
        ...

    def request_ended(self, kind: RequestKind, outcome: RequestOutcome, seconds: float) -> None:
        """Note the end of a request, and how long it took."""
        ...

    def publishes_lost(self, count: int) -> None:
        """Note messages that were refused because there is no connection, or that a lost one took with it.

        What had been handed to the socket when the connection broke may be lost too, and is not known: a reconnect tells.
        """
        ...

    def messages_dropped(self, count: int) -> None:
        """Note messages that arrived and were thrown away because their reader was too slow."""
        ...

    def events_dropped(self, count: int) -> None:
        """Note events for a stream that will not be stored."""
        ...


class NoObserver:
    """Counts nothing."""

    def disconnected(self) -> None:
        """See `BusObserver.disconnected`."""

    def reconnected(self) -> None:
        """See `BusObserver.reconnected`."""

    def request_ended(self, kind: RequestKind, outcome: RequestOutcome, seconds: float) -> None:
        """See `BusObserver.request_ended`."""

    def publishes_lost(self, count: int) -> None:
        """See `BusObserver.publishes_lost`."""

    def messages_dropped(self, count: int) -> None:
        """See `BusObserver.messages_dropped`."""

    def events_dropped(self, count: int) -> None:
        """See `BusObserver.events_dropped`."""
