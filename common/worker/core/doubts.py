"""Whether the failures of transfers are reason to doubt the link itself. Pure.

A link is told of as linked as long as the peer lives, so a peer whose data plane hangs, or whose connections are gone, would be given
one request after the other. A link has a connection for each two ranks that move something between them, and one of them may be dead
while all others work: each is judged by itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

from contracts.requests import WorkerRef

MAX_FAILED_IN_A_ROW: Final = 5
"""Handoffs over a connection that may fail one after the other: single ones do, when their memory is taken back under way."""


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a replica here, and one of a replica of `peer`. Without ranks: the link of the two replicas as a whole."""

    peer: WorkerRef
    own_dp_rank: int
    peer_dp_rank: int
    own_rank: int | None = None
    peer_rank: int | None = None


class Doubts:
    """Counts, by connection, the handoffs whose transfer failed since something was last moved over it."""

    def __init__(self) -> None:
        self._failed: dict[WorkerRef, dict[Connection, int]] = {}

    def moved(self, connection: Connection) -> None:
        """Note that something has arrived."""
        failed = self._failed.get(connection.peer)
        if failed is not None and failed.pop(connection, None) is not None and not failed:
            del self._failed[connection.peer]

    def failed(self, connection: Connection, *, is_unclear: bool = False) -> bool:
        """Note a handoff's failure; whether the link is to be doubted. Then all counts of the peer begin anew.

        When nobody can tell whether the peer still moves bytes (`is_unclear`), it is doubted at once.
        """
        failed = self._failed.setdefault(connection.peer, {})
        failed[connection] = failed.get(connection, 0) + 1
        if is_unclear or failed[connection] >= MAX_FAILED_IN_A_ROW:
            self.forget(connection.peer)
            return True
        return False

    def forget(self, peer: WorkerRef) -> None:
        """The link with a start of a peer is gone, and its connections with it."""
        self._failed.pop(peer, None)
