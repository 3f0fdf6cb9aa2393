"""What a data plane has open, and closes with itself: its own regions, and its connections to those of peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.dataplane.port import DataPlaneError


class Closable(Protocol):
    """Something with an end."""

    def close(self) -> None:
        """End it. Idempotent."""
        ...


Own = TypeVar("Own", bound=Closable)
Peer = TypeVar("Peer", bound=Closable)


class OpenEnds(Generic[Own, Peer]):
    """The open regions and connections of one data plane. Any thread may call any method."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._regions: list[Own] = []
        self._remotes: list[Peer] = []
        self._closed = False

    def allocated(self, make: Callable[[int], Own]) -> Own:
        """Keep the region that `make` returns, one at a time; it is given how many there were before.

        Raises `DataPlaneError` once this has been closed.
        """
        with self._guard:
            if self._closed:
                raise DataPlaneError("this data plane is closed")
            region = make(len(self._regions))
            self._regions.append(region)
            return region

    def connected(self, remote: Peer) -> Peer:
        """Keep a connection; it is closed at once when this was closed while it was made."""
        with self._guard:
            self._remotes.append(remote)
            closed = self._closed
        if closed:
            remote.close()
        return remote

    def forget(self, remote: Peer) -> None:
        """A connection has been closed. Twice is fine."""
        with self._guard:
            if remote in self._remotes:
                self._remotes.remove(remote)

    def close(self) -> None:
        """Close every connection, then every region. Idempotent."""
        with self._guard:
            self._closed = True
            remotes = tuple(self._remotes)
        for remote in remotes:
            remote.close()
        for region in self._regions:
            region.close()
