"""The handoffs that write, or have just written, to decode workers, and what their pushes say of the links. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from common.worker.core.doubts import Connection, Doubts
from contracts.rank import PartPushed, PushOutcome
from contracts.requests import WorkerRef

MAX_ENDED: Final = 4096
"""Handoffs that are remembered after their end: a write of theirs may be given up only then."""

_NO_DOUBT: Final = frozenset({PushOutcome.STALE, PushOutcome.NOT_TRIED})
"""Failures that say nothing of the connection: the destination took its memory back, or nothing was sent."""


class _Transfer(msgspec.Struct, kw_only=True):
    """One handoff: where it writes to, since when over the link that there was then, and over which connections it failed."""

    peer: WorkerRef
    dp_rank: int
    bound_ns: int | None = None
    failed: set[Connection] = set()


class Transfers:
    """By handoff. Times are those of one monotonic clock, in ns."""

    def __init__(self) -> None:
        self._going: dict[str, _Transfer] = {}
        self._ended: dict[str, _Transfer] = {}
        self._linked_ns: dict[WorkerRef, int] = {}
        self._doubts = Doubts()

    def begins(self, handoff_id: str, peer: WorkerRef, dp_rank: int) -> None:
        """A handoff will write to a replica of a peer."""
        self._going[handoff_id] = _Transfer(peer=peer, dp_rank=dp_rank)

    def bound(self, handoff_id: str, now_ns: int) -> None:
        """It has found its link: from now on it uses that one, and no other that is made later."""
        if handoff_id in self._going:
            self._going[handoff_id].bound_ns = now_ns

    def ends(self, handoff_id: str) -> WorkerRef | None:
        """It writes no more, as far as its worker is concerned: to whom it did. None if it is over already."""
        transfer = self._going.pop(handoff_id, None)
        if transfer is None:
            return None
        self._ended[handoff_id] = transfer
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return transfer.peer

    def count(self, peer: WorkerRef) -> int:
        """How many write to a peer."""
        return sum(transfer.peer == peer for transfer in self._going.values())

    def linked(self, peer: WorkerRef, now_ns: int) -> None:
        """A link has been made: what was bound before says nothing of it."""
        self._linked_ns[peer] = now_ns
        self._doubts.forget(peer)

    def unlinked(self, peer: WorkerRef) -> None:
        """It is gone, and its connections with it."""
        self._linked_ns.pop(peer, None)
        self._doubts.forget(peer)

    def doubted(self, own_dp_rank: int, push: PartPushed) -> WorkerRef | None:
        """Note what a rank of one replica here says of a push: the peer whose link is to be doubted because of it.

        A failure counts once a handoff and connection. One of a handoff that is over counts only if nobody knows its end.
        """
        is_unclear = push.outcome is PushOutcome.INDETERMINATE
        transfer = self._going.get(push.handoff_id) or (self._ended.get(push.handoff_id) if is_unclear else None)
        if transfer is None or push.outcome in _NO_DOUBT:
            return None
        linked_ns = self._linked_ns.get(transfer.peer)
        if linked_ns is None or (transfer.bound_ns is not None and transfer.bound_ns < linked_ns):
            return None
        connection = Connection(
            peer=transfer.peer,
            own_dp_rank=own_dp_rank,
            peer_dp_rank=transfer.dp_rank,
            own_rank=push.rank,
            peer_rank=push.destination_rank,
        )
        if push.outcome is PushOutcome.DONE:
            self._doubts.moved(connection)
            return None
        if connection in transfer.failed:
            return None
        transfer.failed.add(connection)
        return transfer.peer if self._doubts.failed(connection, is_unclear=is_unclear) else None
