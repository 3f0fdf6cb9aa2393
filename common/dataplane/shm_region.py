"""A shared-memory region in its owner: allocation, generations, and revocation by lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from common.dataplane.fd_server import FdServer, RegionRequest
from common.dataplane.ofd_lock import try_lock, unlock
from common.dataplane.port import Quiescence, WriteGrant
from common.dataplane.shm_memory import RegionMemory, create_memory, data_offset, lock_offset
from contracts.dataplane import RegionDescriptor

TRANSPORT: Final = "shm"
_SHORTEST_NAP_S: Final = 0.000_05
_LONGEST_NAP_S: Final = 0.002


class ShmRegion:
    """Memory that this process owns. See `port.Region`."""

    def __init__(
        self, server: FdServer, request: RegionRequest, nbytes: int, num_cells: int, *, now: Callable[[], float]
    ) -> None:
        """Use `ShmDataPlane.allocate`: allocates the memory and has `server` answer `request` with it."""
        self._server = server
        self._request = request
        self._now = now
        self._guard = threading.Lock()
        self._fd = create_memory(nbytes, num_cells)
        self.memory: Final = RegionMemory(self._fd, num_cells, nbytes)
        self.descriptor: Final = RegionDescriptor(
            transport=TRANSPORT,
            peer_id=request.peer_id,
            incarnation=request.incarnation,
            region_id=request.region_id,
            generation=request.generation,
            base=data_offset(num_cells),
            length=nbytes,
            num_cells=num_cells,
            opaque=os.fspath(server.path),
        )
        server.add(request, self._fd)

    @property
    def data(self) -> memoryview:
        """The data part, writable."""
        return self.memory.data

    def generation(self, cell: int) -> int:
        """The value of one generation cell."""
        return self.memory.generation(cell)

    def open_grant(self, grant: WriteGrant) -> None:
        """Store the grant's generation into its cells: the descriptor of the memory is the capability here, not the secret."""
        self.set_generations(grant.cells, grant.generation)

    def set_generations(self, cells: Sequence[int], value: int) -> None:
        """Store `value` into `cells`; they only rise."""
        with self._guard:
            self.memory.raise_cells(cells, value)

    def revoke(self, cells: Sequence[int], lock_cell: int, value: int, deadline: float) -> Quiescence:
        """Raise `cells` to `value`, then wait until no writer holds `lock_cell`'s byte: YES, or NO at `deadline`."""
        self.memory.check_cells((lock_cell,))
        self.set_generations(cells, value)
        offset = lock_offset(lock_cell)
        nap = _SHORTEST_NAP_S
        with self._guard:
            if self._fd < 0:
                return Quiescence.CANNOT_TELL
            fd = os.dup(self._fd)  # so that a close meanwhile cannot put another file under the number
        try:
            # Two threads that revoke through the same open file do not exclude each other, and need not: what counts is
            # that at one moment after the generations rose no writer held the byte.
            while not try_lock(fd, offset, exclusive=True):
                remaining = deadline - self._now()
                if remaining <= 0:
                    return Quiescence.NO
                time.sleep(min(nap, remaining))
                nap = min(2 * nap, _LONGEST_NAP_S)
            unlock(fd, offset)
        finally:
            os.close(fd)
        return Quiescence.YES

    def close(self) -> None:
        """Stop serving the region. Idempotent."""
        with self._guard:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            self._server.remove(self._request)
            os.close(fd)
