"""Whether the failures of transfers are reason to doubt the link itself. Pure.

A link is told of as linked as long as the peer lives, so a peer whose data plane hangs, or whose connections are gone, would be given
one request after the other.
"""

from __future__ import annotations

from typing import Final

from contracts.requests import WorkerRef

MAX_FAILED_IN_A_ROW: Final = 5
"""Handoffs with a peer that may fail one after the other: single ones do, when their memory is taken back under way."""


class Doubts:
    """Counts, by start of a peer, the handoffs whose transfer failed since something was last moved to or from it."""

    def __init__(self) -> None:
        self._failed: dict[WorkerRef, int] = {}

    def moved(self, peer: WorkerRef) -> None:
        """Note that something has arrived."""
        self._failed.pop(peer, None)

    def failed(self, peer: WorkerRef, *, is_unclear: bool = False) -> bool:
        """Note a handoff's failure; whether the link is to be doubted. Then the count begins anew.

        When nobody can tell whether the peer still moves bytes (`is_unclear`), it is doubted at once.
        """
        count = self._failed.pop(peer, 0) + 1
        if is_unclear or count >= MAX_FAILED_IN_A_ROW:
            return True
        self._failed[peer] = count
        return False
