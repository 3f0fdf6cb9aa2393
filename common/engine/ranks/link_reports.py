"""The links that an engine is making: one report of each rank for an attempt, unless the attempt is given up before."""

from __future__ import annotations

import asyncio
from typing import Final

from common.engine.port import EngineDeadError
from contracts.rank import PeerLinked
from contracts.requests import WorkerRef


class Linking:
    """One attempt. `ended` has a result once every rank has reported, or once `is_given_up`."""

    def __init__(self, peer: WorkerRef, attempt: int) -> None:
        self.peer: Final = peer
        self.attempt: Final = attempt
        self.ended: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self.reports: Final[dict[int, PeerLinked]] = {}
        self.is_given_up = False
        """The peer has been unlinked meanwhile, or is being linked anew: what the ranks report of this attempt counts no more."""

    def end(self) -> None:
        """Wake who waits. Twice is fine."""
        if not self.ended.done():
            self.ended.set_result(None)


class LinkReports:
    """What ranks report of links. A peer has at most one attempt that counts; reports of any other are late news, and dropped."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._linkings: dict[WorkerRef, Linking] = {}

    def begin(self, peer: WorkerRef, attempt: int) -> Linking:
        """Expect the reports of an attempt, in place of an earlier one. To be called before any rank is told."""
        self.give_up(peer)
        self._linkings[peer] = linking = Linking(peer, attempt)
        return linking

    def put(self, rank: int, report: PeerLinked) -> None:
        """Take one rank's report."""
        linking = self._linkings.get(report.peer)
        if linking is None or linking.attempt != report.attempt:
            return
        linking.reports[rank] = report
        if len(linking.reports) == self._num_ranks:
            linking.end()

    def give_up(self, peer: WorkerRef) -> None:
        """Let the attempt with a peer, if there is one, count no more."""
        linking = self._linkings.pop(peer, None)
        if linking is not None:
            linking.is_given_up = True
            linking.end()

    def forget(self, linking: Linking) -> None:
        """Its caller has seen what came of it."""
        if self._linkings.get(linking.peer) is linking:
            del self._linkings[linking.peer]

    def die(self, reason: str) -> None:
        """There will be no reports any more: whoever waits for one gets `EngineDeadError`."""
        for linking in self._linkings.values():
            if not linking.ended.done():
                linking.ended.set_exception(EngineDeadError(reason))
                linking.ended.exception()  # the caller may have gone; a failure that nobody awaits is no news then
        self._linkings.clear()
