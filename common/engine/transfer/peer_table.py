"""The links of one rank. Each is made in a thread of its own: the rank goes on computing and pushing to others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from common.dataplane.port import DataPlane
from common.engine.transfer.failure_reason import log_unexpected
from common.engine.transfer.peers import Peer, PeerDraft
from common.engine.transfer.sources import Source, connect_sources
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.rank import MAX_CONNECTING, AddPeerRank, PeerSide
from contracts.requests import WorkerRef

MAX_THREADS: Final = 2 * MAX_CONNECTING
"""Threads that connect, those included that were told to stop and have not noticed yet."""
JOIN_TIMEOUT_S: Final = 5.0

Report = Callable[[WorkerRef, int, Exception | None], None]
"""Told what came of an attempt, by the thread that made it. Raises `OSError` when nobody listens any more."""


class _Attempt:
    """One try to link with a peer: the one that counts is the one that is in the table."""

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.stop: Final = threading.Event()


class PeerTable:
    """The links of one rank with every replica of each linked worker: those that it pushes to, and those that it pulls from.

    Its methods are for the rank's thread, and none of them waits for a peer. A link is there before `report` hears of it; of
    an attempt that was given up nothing is heard, and what it opens yet is closed. A worker is linked one way at a time.
    """

    def __init__(self, rank: int, data_plane: DataPlane, clock: Clock, report: Report) -> None:
        self._rank = rank
        self._data_plane = data_plane
        self._clock = clock
        self._report = report
        self._drafts: dict[WorkerRef, PeerDraft] = {}
        self._guard = threading.Lock()
        self._peers: dict[WorkerRef, tuple[Peer, ...] | tuple[Source, ...]] = {}
        self._attempts: dict[WorkerRef, _Attempt] = {}
        self._threads: set[threading.Thread] = set()

    def find(self, worker: WorkerRef, dp_rank: int) -> Peer:
        """One replica of a worker that is linked as a destination.

        Raises `PdmeshError`: TRANSFER_FAILED when the worker is not linked so, INVALID_REQUEST when it has no such replica.
        """
        found = self._find(worker, dp_rank, "push.grant")
        if not isinstance(found, Peer):
            raise _not_linked("push.grant", worker)
        return found

    def find_source(self, worker: WorkerRef, dp_rank: int) -> Source:
        """One replica of a worker that is linked as a source. Raises as `find` does."""
        found = self._find(worker, dp_rank, "source")
        if not isinstance(found, Source):
            raise _not_linked("source", worker)
        return found

    def _find(self, worker: WorkerRef, dp_rank: int, field: str) -> Peer | Source:
        with self._guard:
            peers = self._peers.get(worker)
        if peers is None:
            raise _not_linked(field, worker)
        if not 0 <= dp_rank < len(peers):
            rule = f"a replica of {worker.worker_id}: 0 to {len(peers) - 1}"
            raise InvalidValueError(field=f"{field}.dp_rank", value=dp_rank, rule=rule)
        return peers[dp_rank]

    def add(self, command: AddPeerRank) -> None:
        """Remember one rank's layout for a link to come."""
        self._drafts.setdefault(command.peer, PeerDraft()).add(command)

    def link(self, worker: WorkerRef, number: int, side: PeerSide = PeerSide.DESTINATION) -> None:
        """Begin attempt `number` to link, in place of an earlier attempt. The layouts are forgotten, whatever comes of it.

        `side` is the worker's. An earlier link serves until the new one is there. Raises OVERLOADED when too many links are being made.
        """
        draft = self._drafts.pop(worker, PeerDraft())
        attempt = _Attempt(number)
        thread = threading.Thread(
            target=self._work,
            args=(worker, side, draft, attempt),
            name=f"connect-{self._rank}-{worker.worker_id}",
            daemon=True,
        )
        with self._guard:
            self._give_up(worker)
            if len(self._threads) >= MAX_THREADS:
                text = f"{len(self._threads)} links are being made; the rule is: at most {MAX_THREADS} at a time"
                raise PdmeshError(text, code=ErrorCode.OVERLOADED)
            thread.start()
            self._threads.add(thread)
            self._attempts[worker] = attempt

    def unlink(self, worker: WorkerRef) -> None:
        """Forget a peer: linked, being connected to, or half added. Idempotent."""
        self._drafts.pop(worker, None)
        with self._guard:
            self._give_up(worker)
            peers = self._peers.pop(worker, ())
        for peer in peers:
            peer.close()

    def close(self) -> None:
        """Forget all peers, and end all threads within a bound."""
        with self._guard:
            workers = {*self._peers, *self._attempts, *self._drafts}
            threads = tuple(self._threads)
        for worker in workers:
            self.unlink(worker)
        deadline = self._clock.monotonic() + JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _give_up(self, worker: WorkerRef) -> None:
        attempt = self._attempts.pop(worker, None)
        if attempt is not None:
            attempt.stop.set()

    def _work(self, worker: WorkerRef, side: PeerSide, draft: PeerDraft, attempt: _Attempt) -> None:
        try:
            self._connect(worker, side, draft, attempt)
        except Exception as error:  # noqa: BLE001 - mostly nobody is left to report to: the rank is ending
            log_unexpected(error, f"reporting a link with {worker.worker_id}")
        finally:
            with self._guard:
                self._threads.discard(threading.current_thread())

    def _connect(self, worker: WorkerRef, side: PeerSide, draft: PeerDraft, attempt: _Attempt) -> None:
        peers: tuple[Peer, ...] | tuple[Source, ...] = ()
        problem: Exception | None = None
        try:
            if side is PeerSide.SOURCE:
                peers = connect_sources(draft, self._rank, self._data_plane, self._clock, attempt.stop)
            else:
                peers = draft.connect(self._rank, self._data_plane, self._clock, attempt.stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, the report carries it
            log_unexpected(error, f"linking with {worker.worker_id}")
            problem = error
        with self._guard:
            is_wanted = self._attempts.get(worker) is attempt
            if is_wanted:
                del self._attempts[worker]
                if problem is None:
                    peers, self._peers[worker] = self._peers.get(worker, ()), peers
        for peer in peers:  # those that nobody wants: the late ones, or the earlier ones
            try:
                peer.close()
            except Exception as error:  # noqa: BLE001 - whoever waits for the new link is told of it all the same
                log_unexpected(error, f"closing a link with {worker.worker_id}")
        if is_wanted:
            self._report(worker, attempt.number, problem)


def _not_linked(field: str, worker: WorkerRef) -> PdmeshError:
    """A link may go between the placing of a request and its turn: no fault of the request, which may be tried elsewhere."""
    shown, side = f"{worker.worker_id} {worker.incarnation}", "source" if field == "source" else "destination"
    text = f"{field}: {shown!r} is not allowed; the rule is: a start of a worker that is linked as a {side}"
    return PdmeshError(text, code=ErrorCode.TRANSFER_FAILED)
