"""A shared-memory region seen from a peer: writes under the grant's lock, reads that look at the generation twice."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from common.dataplane.cell_check import CellCheck
from common.dataplane.checks import check_grant, check_runs
from common.dataplane.copier import copy_group, groups_of
from common.dataplane.ofd_lock import SharedLocks
from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.dataplane.shm_memory import RegionMemory, lock_offset
from common.dataplane.shm_region import ShmRegion
from common.layout.joining import batch_of
from common.layout.run import Run
from common.layout.run_batch import RunBatch
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError

_MOST_CHECKS: Final = 64
_NAP_S: Final = 0.000_05
_STALE: Final = "the grant's generation is no longer the one in its cells"


class ShmRemoteRegion:
    """A peer's region. See `port.RemoteRegion`. Every transfer has ended when its call returns: never INDETERMINATE."""

    def __init__(
        self,
        descriptor: RegionDescriptor,
        connection: socket.socket,
        fd: int,
        *,
        now: Callable[[], float],
        on_close: Callable[[ShmRemoteRegion], None],
    ) -> None:
        """Use `ShmDataPlane.connect`. Owns `connection` and `fd`, an open file of its own, unless it raises.

        After `on_close` nobody should keep this object: the peer's memory stays mapped, and in use, as long as it lives.
        """
        self.descriptor: Final = descriptor
        self._memory = RegionMemory(fd, descriptor.num_cells, descriptor.length)
        self._fd = fd
        self._connection = connection
        self._locks = SharedLocks(fd)
        self._now = now
        self._on_close = on_close
        self._guard = threading.Lock()
        self._num_users = 0
        self._closed = False
        self._peer_alive = True
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN | select.POLLRDHUP)
        self._checks: dict[int, CellCheck] = {}

    @property
    def peer_alive(self) -> bool:
        """False once the owner has closed the region or died, or this end is closed."""
        with self._guard:
            # After its one answer the peer says nothing more: whatever can be read is the end of the file.
            if self._peer_alive and not self._closed and self._readable.poll(0):
                try:
                    self._peer_alive = bool(self._connection.recv(1, socket.MSG_PEEK))
                except BlockingIOError:
                    pass
                except OSError:
                    self._peer_alive = False
            return self._peer_alive and not self._closed

    def write(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from `local` into this region, under the grant's lock."""
        here = _memory_of(local)
        if refused := self._refusal(runs, here, grant):
            return _failed(refused)
        if not self._enter():
            return _failed("this end is closed")
        try:
            cells = self._check_of(grant)
            offset = lock_offset(grant.lock_cell)
            while not self._locks.try_acquire(offset):
                # A revoker has the byte. It may be a late repetition for an earlier owner of the slot, so look, and try again.
                if refused := self._stop_reason(cells, grant.generation, deadline):
                    return _failed(refused)
                time.sleep(_NAP_S)
            try:
                return self._copy(batch_of(runs), here, cells, grant.generation, deadline, to_remote=True)
            finally:
                self._locks.release(offset)
        finally:
            self._leave()

    def read(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from this region into `local`; the owner may revoke meanwhile, so the generation is read again afterwards."""
        here = _memory_of(local)
        if refused := self._refusal(runs, here, grant):
            return _failed(refused)
        if not self._enter():
            return _failed("this end is closed")
        try:
            cells = self._check_of(grant)
            result = self._copy(batch_of(runs), here, cells, grant.generation, deadline, to_remote=False)
            # A lock taken and dropped: the generations below are read after the bytes on every processor. A frozen reader
            # hurts nobody, so it does not hold the lock while it copies.
            offset = lock_offset(grant.lock_cell)
            if self._locks.try_acquire(offset):
                self._locks.release(offset)
            if result.outcome is Outcome.DONE and not cells.all_hold(grant.generation):
                return _failed(_STALE, result.nbytes)
            return result
        finally:
            self._leave()

    def close(self) -> None:
        """Let go of the region; the last transfer in flight closes the descriptor."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            idle = self._num_users == 0
        self._on_close(self)
        if idle:
            self._release()

    def _copy(
        self,
        batch: RunBatch,
        local: RegionMemory,
        cells: CellCheck,
        generation: int,
        deadline: float,
        *,
        to_remote: bool,
    ) -> TransferResult:
        nbytes = 0
        if reason := self._stop_reason(cells, generation, deadline):
            return _failed(reason)
        for group in groups_of(batch):
            if nbytes and (reason := self._stop_reason(cells, generation, deadline)):
                return _failed(reason, nbytes)
            nbytes += copy_group(group, local, self._memory, to_remote=to_remote)
        if to_remote and (reason := self._stop_reason(cells, generation, None)):
            return _failed(reason, nbytes)
        return TransferResult(outcome=Outcome.DONE, nbytes=nbytes)

    def _refusal(self, runs: Sequence[Run], local: RegionMemory, grant: WriteGrant) -> str:
        """Why these arguments are refused whatever the time; "" when they are not."""
        known = self._known(grant.cells) is not None and 0 <= grant.lock_cell < self._memory.num_cells
        refused = "" if known else check_grant(grant, self._memory.num_cells)
        return refused or check_runs(runs, local.length, self._memory.length)

    def _check_of(self, grant: WriteGrant) -> CellCheck:
        """The check of a grant whose cells lie in the header. All writes of a chunk name the same tuple: it is prepared once."""
        check = self._known(grant.cells)
        if check is None:
            check = CellCheck(self._memory, grant.cells)
            if len(self._checks) >= _MOST_CHECKS:
                self._checks.clear()
            self._checks[id(check.cells)] = check
        return check

    def _known(self, cells: tuple[int, ...]) -> CellCheck | None:
        """The check of this very tuple, if there is one: it keeps the tuple alive, so that no other has its identity."""
        check = self._checks.get(id(cells))
        return check if check is not None and check.cells is cells else None

    def _stop_reason(self, cells: CellCheck, generation: int, deadline: float | None) -> str:
        """Why a transfer must not start or go on; "" when it may."""
        if not cells.all_hold(generation):
            return _STALE
        if not self.peer_alive:
            return "the peer has closed the region or died, or this end is closed"
        if deadline is not None and self._now() >= deadline:
            return "the deadline has passed"
        return ""

    def _enter(self) -> bool:
        """Keep the descriptors open for one transfer, until `_leave`; False when they are not open any more."""
        with self._guard:
            self._num_users += not self._closed
            return not self._closed

    def _leave(self) -> None:
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


def _failed(reason: str, nbytes: int = 0) -> TransferResult:
    return TransferResult(outcome=Outcome.FAILED_QUIESCED, nbytes=nbytes, reason=reason, is_stale=reason is _STALE)
