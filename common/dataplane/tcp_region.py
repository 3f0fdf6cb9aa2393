"""A region that peers reach over TCP, in its owner: memory, generations, open grants, and the writes under way.

A write is let in and a grant is revoked under one lock, so that every write is either refused or known to the revoker. The revoker
stops those that it finds, and waits until their threads have left the memory.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from common.dataplane.cell_check import CellCheck
from common.dataplane.checks import check_grant
from common.dataplane.port import SECRET_BYTES, Quiescence, WriteGrant
from common.dataplane.shm_memory import RegionMemory, create_memory
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError

STALE: Final = "the grant's generation is no longer the one in its cells"
_MOST_CHECKS: Final = 64
"""Checks that are kept: the transfers of all layers of a chunk name the same cells."""
_CLOSED: Final = "the region has been closed"


class RefusedError(Exception):
    """A transfer may not begin, or does not count; the text says why."""


class StaleError(RefusedError):
    """The reason is its grant: not, or no longer, the one in its cells, or shown without its secret. The connection is sound."""

    def __init__(self, text: str = STALE) -> None:
        super().__init__(text)


class Stoppable(Protocol):
    """The connection that a write comes in on."""

    def stop_reading(self) -> None:
        """End a receive under way, from any thread."""
        ...


class Landing:
    """One write that was let in. Its thread must not touch the memory any more after `TcpRegion.leave`."""

    def __init__(self, grant: WriteGrant, cells: CellCheck, connection: Stoppable) -> None:
        self.grant: Final = grant
        self.cells: Final = cells
        self.connection: Final = connection


class TcpRegion:
    """Memory that this process owns. See `port.Region`."""

    def __init__(
        self,
        descriptor: RegionDescriptor,
        *,
        now: Callable[[], float],
        on_close: Callable[[TcpRegion], None],
    ) -> None:
        """Use `TcpDataPlane.allocate`: allocates and prefaults what `descriptor` says; `on_close` ends the region's connections."""
        fd = create_memory(descriptor.length, descriptor.num_cells)
        try:
            self.memory: Final = RegionMemory(fd, descriptor.num_cells, descriptor.length)
        finally:
            os.close(fd)  # nobody else maps it: the mapping alone keeps it
        self.descriptor: Final = descriptor
        self._now = now
        self._on_close = on_close
        self._changed = threading.Condition()
        self._secrets: dict[int, tuple[int, bytes]] = {}
        self._landings: set[Landing] = set()
        self._checks: dict[tuple[int, ...], CellCheck] = {}
        self._closed = False

    @property
    def data(self) -> memoryview:
        """The data part, writable."""
        return self.memory.data

    def generation(self, cell: int) -> int:
        """The value of one generation cell."""
        return self.memory.generation(cell)

    def open_grant(self, grant: WriteGrant) -> None:
        """Let those in who show the grant's secret; it replaces that of an earlier grant with the same lock cell."""
        if len(grant.secret) != SECRET_BYTES:
            raise InvalidValueError(
                field="secret", value=f"{len(grant.secret)} bytes", rule=f"{SECRET_BYTES} bytes over tcp"
            )
        self.memory.check_cells((grant.lock_cell,))
        with self._changed:
            self.memory.raise_cells(grant.cells, grant.generation)
            self._secrets[grant.lock_cell] = (grant.generation, grant.secret)

    def set_generations(self, cells: Sequence[int], value: int) -> None:
        """Store `value` into `cells`; they only rise."""
        with self._changed:
            self.memory.raise_cells(cells, value)

    def revoke(self, cells: Sequence[int], lock_cell: int, value: int, deadline: float) -> Quiescence:
        """Raise `cells` to `value`, stop the writes of `lock_cell` that are under way, and wait for their threads until `deadline`."""
        self.memory.check_cells((lock_cell,))
        with self._changed:
            self.memory.raise_cells(cells, value)
            if self._closed:
                return Quiescence.CANNOT_TELL
            known = self._secrets.get(lock_cell)
            if known is not None and known[0] < value:
                del self._secrets[lock_cell]
            revoked = {
                landing
                for landing in self._landings
                if landing.grant.lock_cell == lock_cell and landing.grant.generation < value
            }
            self._stop(revoked)
            timeout_s = max(0.0, deadline - self._now())
            idle = self._changed.wait_for(lambda: revoked.isdisjoint(self._landings), timeout_s)
        return Quiescence.YES if idle else Quiescence.NO

    def close(self) -> None:
        """Stop serving the region and end its connections. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._stop(self._landings)
        self._on_close(self)

    def check(self, grant: WriteGrant) -> CellCheck:
        """Whether a transfer under `grant` may begin: the check to repeat at its end. Raises `RefusedError`."""
        cells = self._cells_of(grant)
        with self._changed:
            self._check_now(grant, cells)
        return cells

    def enter(self, grant: WriteGrant, connection: Stoppable) -> Landing:
        """Let a write in: from now on a revocation stops it through `connection`, and waits for `leave`. Raises `RefusedError`."""
        landing = Landing(grant, self._cells_of(grant), connection)
        with self._changed:
            self._check_now(grant, landing.cells)
            self._landings.add(landing)
        return landing

    def leave(self, landing: Landing) -> bool:
        """A write has ended: whether its grant was valid to the end. Idempotent; only the first answer counts."""
        with self._changed:
            known = landing in self._landings
            self._landings.discard(landing)
            self._changed.notify_all()
            return known and not self._closed and landing.cells.all_hold(landing.grant.generation)

    def _cells_of(self, grant: WriteGrant) -> CellCheck:
        cells = self._checks.get(grant.cells)
        if cells is None or not 0 <= grant.lock_cell < self.memory.num_cells:
            if refused := check_grant(grant, self.memory.num_cells):
                raise RefusedError(refused)
            cells = CellCheck(self.memory, grant.cells)
        return cells

    def _stop(self, landings: set[Landing]) -> None:
        for landing in landings:
            landing.connection.stop_reading()

    def _check_now(self, grant: WriteGrant, cells: CellCheck) -> None:
        if self._closed:
            raise RefusedError(_CLOSED)
        generation, secret = self._secrets.get(grant.lock_cell, (-1, b""))
        if generation != grant.generation or not cells.all_hold(grant.generation):
            raise StaleError
        if not hmac.compare_digest(secret, grant.secret):
            raise StaleError("the grant's secret is not the one that it was opened with")
        if cells.cells is grant.cells:  # prepared just now; kept only for those who were let in
            if len(self._checks) >= _MOST_CHECKS:
                self._checks.clear()
            self._checks[grant.cells] = cells
