"""A shared-memory region seen from a peer: writes under the grant's lock, reads that look at the generation twice."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from common.dataplane.checks import check_grant
from common.dataplane.copier import CHUNK_BYTES, Batch, Side, copy_piece
from common.dataplane.ofd_lock import SharedLocks
from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.dataplane.shm_memory import RegionMemory, data_offset, lock_offset
from common.dataplane.shm_region import ShmRegion
from common.layout.run import Run
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError

_NAP_S: Final = 0.000_05
_STALE: Final = "the grant's generation is no longer the one in its cells"


class ShmRemoteRegion:
    """A peer's region. See `port.RemoteRegion`. Every transfer has ended when its call returns: never INDETERMINATE."""

    def __init__(
        self, descriptor: RegionDescriptor, connection: socket.socket, fd: int, now: Callable[[], float]
    ) -> None:
        """Use `ShmDataPlane.connect`. Owns `connection` and `fd`, an open file of its own, unless it raises."""
        self.descriptor: Final = descriptor
        self._memory = RegionMemory(fd, descriptor.num_cells, descriptor.length)
        self._fd = fd
        self._connection = connection
        self._locks = SharedLocks(fd)
        self._now = now
        self._guard = threading.Lock()
        self._num_users = 0
        self._closed = False
        self._peer_alive = True

    @property
    def closed(self) -> bool:
        """Whether this end has been closed."""
        return self._closed

    @property
    def peer_alive(self) -> bool:
        """False once the owner has closed the region or died, or this end is closed."""
        with self._guard:
            if self._peer_alive and not self._closed:
                try:
                    # After its one answer the peer says nothing more: whatever can be read is the end of the file.
                    self._peer_alive = bool(self._connection.recv(1, socket.MSG_PEEK))
                except BlockingIOError:
                    pass
                except OSError:
                    self._peer_alive = False
            return self._peer_alive and not self._closed

    def write(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from `local` into this region, under the grant's lock."""
        here = _memory_of(local)
        batch = Batch(runs)
        with self._use() as is_open:
            refused = self._refusal(batch, here, grant) if is_open else "this end is closed"
            if refused:
                return _failed(refused)
            offset = lock_offset(grant.lock_cell)
            while not self._locks.try_acquire(offset):
                # A revoker has the byte. It may be a late repetition for an earlier owner of the slot, so look, and try again.
                if refused := self._stop_reason(grant, deadline):
                    return _failed(refused)
                time.sleep(_NAP_S)
            try:
                return self._copy(batch, here, grant, deadline, to_remote=True)
            finally:
                self._locks.release(offset)

    def read(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from this region into `local`; the owner may revoke meanwhile, so the generation is read again afterwards."""
        here = _memory_of(local)
        batch = Batch(runs)
        with self._use() as is_open:
            refused = self._refusal(batch, here, grant) if is_open else "this end is closed"
            if refused:
                return _failed(refused)
            result = self._copy(batch, here, grant, deadline, to_remote=False)
            # A lock taken and dropped: the generations below are read after the bytes on every processor. A frozen reader
            # hurts nobody, so it does not hold the lock while it copies.
            offset = lock_offset(grant.lock_cell)
            if self._locks.try_acquire(offset):
                self._locks.release(offset)
            if result.outcome is Outcome.DONE and not self._memory.all_hold(grant.cells, grant.generation):
                return _failed(_STALE, result.nbytes)
            return result

    def close(self) -> None:
        """Let go of the region; the last transfer in flight closes the descriptor."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            idle = self._num_users == 0
        if idle:
            self._release()

    def _copy(
        self, batch: Batch, local: RegionMemory, grant: WriteGrant, deadline: float, *, to_remote: bool
    ) -> TransferResult:
        here, there = _side(local), _side(self._memory)
        nbytes = since_check = 0
        if reason := self._stop_reason(grant, deadline):
            return _failed(reason)
        for piece in batch.pieces():
            if since_check >= CHUNK_BYTES:
                since_check = 0
                if reason := self._stop_reason(grant, deadline):
                    return _failed(reason, nbytes)
            copy_piece(piece, here, there, to_remote=to_remote)
            nbytes += piece.nbytes
            since_check += piece.nbytes
        if to_remote and (reason := self._stop_reason(grant, None)):
            return _failed(reason, nbytes)
        return TransferResult(outcome=Outcome.DONE, nbytes=nbytes)

    def _refusal(self, batch: Batch, local: RegionMemory, grant: WriteGrant) -> str:
        """Why these arguments are refused whatever the time; "" when they are not."""
        return check_grant(grant, self._memory.num_cells) or batch.refusal(local.length, self._memory.length)

    def _stop_reason(self, grant: WriteGrant, deadline: float | None) -> str:
        """Why a transfer must not start or go on; "" when it may."""
        if not self._memory.all_hold(grant.cells, grant.generation):
            return _STALE
        if not self.peer_alive:
            return "the peer has closed the region or died, or this end is closed"
        if deadline is not None and self._now() >= deadline:
            return "the deadline has passed"
        return ""

    @contextlib.contextmanager
    def _use(self) -> Iterator[bool]:
        """Keep the descriptors open for one transfer; yields whether there can be one."""
        with self._guard:
            closed = self._closed
            self._num_users += not closed
        try:
            yield not closed
        finally:
            if not closed:
                with self._guard:
                    self._num_users -= 1
                    last = self._closed and self._num_users == 0
                if last:
                    self._release()

    def _release(self) -> None:
        self._connection.close()
        os.close(self._fd)


def _memory_of(region: Region) -> RegionMemory:
    if not isinstance(region, ShmRegion):
        raise InvalidValueError(
            field="local", value=type(region).__name__, rule="a region of a shared-memory data plane"
        )
    return region.memory


def _side(memory: RegionMemory) -> Side:
    return Side(map=memory.map, address=memory.address, base=data_offset(memory.num_cells), length=memory.length)


def _failed(reason: str, nbytes: int = 0) -> TransferResult:
    return TransferResult(outcome=Outcome.FAILED_QUIESCED, nbytes=nbytes, reason=reason)
