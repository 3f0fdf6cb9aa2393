# ruff: noqa: N818 - these name states of a call, and read better without the suffix
"""What can go wrong on the bus. Library errors never leave an adapter: it raises these."""

from typing import Final, Self

from contracts.errors import ErrorCode, PdmeshError

_SHORTEST_NAMED_S: Final = 0.001


class BusError(PdmeshError):
    """Base of all bus errors."""


class BusUnavailable(BusError):
    """There is no connection to the server, or it broke while the call was in flight."""

    code = ErrorCode.BUS_UNAVAILABLE

    def __init__(self, message: str, *, maybe_done: bool) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done
        """False: the call never left this process. True: its outcome is unknown, so read before writing again."""


class BusTimeout(BusError):
    """No answer came in time. The outcome is unknown: read before writing again."""

    code = ErrorCode.BUS_UNAVAILABLE

    @classmethod
    def of_request(cls, subject: str, timeout_s: float) -> Self:
        """For a request that had `timeout_s` seconds. Below a millisecond its caller's time was over: no wait is named then."""
        if timeout_s < _SHORTEST_NAMED_S:
            return cls(f"no answer from {subject}: the time for it was over")
        return cls(f"no answer from {subject} within {timeout_s:.3f} s")


class NoResponders(BusError):
    """Nobody subscribes to the subject of a request: the fast sign of a dead peer. Nothing was done."""

    code = ErrorCode.WORKER_LOST


class PayloadTooLarge(BusError):
    """Payload and headers together are over the bus's cap. Nothing was sent."""

    code = ErrorCode.PROTOCOL


class InvalidSubject(BusError):
    """A subject, key or header that the bus cannot carry. Nothing was sent."""

    code = ErrorCode.PROTOCOL


class RevisionConflict(BusError):
    """A compare-and-set lost: the key exists already, or its revision is not the expected one. Nothing was written."""

    code = ErrorCode.STALE_FENCE


class StorageRefused(BusError):
    """The server refuses a bucket, stream or write for a reason that a retry does not change (limits, rights, options)."""


class ServerTooOld(BusError):
    """The server's version is below what the adapter was written for."""
