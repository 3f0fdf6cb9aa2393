"""What the endpoints of a fake data plane share: their regions, and the faults that a test plants."""

from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from common.dataplane.generations import check_cells, raise_cells
from common.dataplane.port import Quiescence, WriteGrant
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError

TRANSPORT: Final = "fake"


class FaultKind(enum.Enum):
    """What a planted fault does to one transfer."""

    HOLD = "hold"
    """Wait, with the grant's lock held and before a byte moves, until the fault's `gate` is set."""
    FAIL_BEFORE = "fail_before"
    """FAILED_QUIESCED, with nothing copied."""
    FAIL_AFTER = "fail_after"
    """FAILED_QUIESCED, with everything copied."""
    INDETERMINATE = "indeterminate"
    """INDETERMINATE, with nothing copied yet: the bytes land, and the lock is let go, when `settle` is called."""
    CORRUPT = "corrupt"
    """DONE, but the first byte that was copied is wrong."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault for one transfer. `entered` is set when a HOLD begins, so that a test needs no sleep."""

    kind: FaultKind
    gate: threading.Event = msgspec.field(default_factory=threading.Event)
    entered: threading.Event = msgspec.field(default_factory=threading.Event)


class FakeNetwork:
    """What the endpoints of one test share: regions by address, and the faults still to come."""

    def __init__(self) -> None:
        self.regions: Final[dict[tuple[str, str, str], FakeRegion]] = {}
        self.faults: Final[deque[Fault]] = deque()
        self.late: Final[list[Callable[[], None]]] = []
        self.generations: Final = itertools.count(1)

    def plant(self, *faults: Fault) -> None:
        """Give each of `faults` to one of the next transfers, in order."""
        self.faults.extend(faults)

    def settle(self) -> None:
        """Let the bytes of every INDETERMINATE transfer land now."""
        while self.late:
            self.late.pop(0)()


class FakeRegion:
    """Memory of one endpoint. See `port.Region`."""

    def __init__(self, network: FakeNetwork, descriptor: RegionDescriptor, *, now: Callable[[], float]) -> None:
        """Use `FakeDataPlane.allocate`."""
        for field, value in (("nbytes", descriptor.length), ("num_cells", descriptor.num_cells)):
            if value <= 0:
                raise InvalidValueError(field=field, value=value, rule="more than 0")
        self._network = network
        self._now = now
        self.descriptor: Final = descriptor
        self.data: Final = memoryview(bytearray(descriptor.length))
        self.cells: Final = [0] * descriptor.num_cells
        self.changed: Final = threading.Condition()
        self.num_writers: Final[dict[int, int]] = {}
        self.alive = True
        self._secrets: Final[dict[int, bytes]] = {}
        network.regions[address_of(descriptor)] = self

    def generation(self, cell: int) -> int:
        """The value of one generation cell."""
        check_cells(self.cells, (cell,))
        return self.cells[cell]

    def open_grant(self, grant: WriteGrant) -> None:
        """Let those who hold `grant` in; any secret will do, also an empty one, but it must be shown again."""
        check_cells(self.cells, (grant.lock_cell,))
        self.set_generations(grant.cells, grant.generation)
        self._secrets[grant.lock_cell] = grant.secret

    def set_generations(self, cells: Sequence[int], value: int) -> None:
        """Store `value` into `cells`; they only rise."""
        with self.changed:
            raise_cells(self.cells, cells, value)

    def revoke(self, cells: Sequence[int], lock_cell: int, value: int, deadline: float) -> Quiescence:
        """Raise `cells` to `value`, then wait for the writers that hold `lock_cell`."""
        check_cells(self.cells, (lock_cell,))
        self.set_generations(cells, value)
        self._secrets.pop(lock_cell, None)
        with self.changed:
            if not self.alive:
                return Quiescence.CANNOT_TELL
            timeout_s = max(0.0, deadline - self._now())
            idle = self.changed.wait_for(lambda: not self.num_writers.get(lock_cell), timeout_s)
        return Quiescence.YES if idle else Quiescence.NO

    def close(self) -> None:
        """Stop serving the region. Idempotent."""
        self.alive = False
        self._network.regions.pop(address_of(self.descriptor), None)

    def holds(self, grant: WriteGrant) -> bool:
        """Whether the grant is the current one of all its cells, and shows the secret that it was opened with."""
        current = all(self.cells[cell] == grant.generation for cell in grant.cells)
        return current and self._secrets.get(grant.lock_cell, b"") == grant.secret

    def enter(self, lock_cell: int) -> None:
        """A writer takes its share of the grant's lock."""
        with self.changed:
            self.num_writers[lock_cell] = self.num_writers.get(lock_cell, 0) + 1

    def leave(self, lock_cell: int) -> None:
        """A writer gives its share back."""
        with self.changed:
            self.num_writers[lock_cell] -= 1
            self.changed.notify_all()


def address_of(descriptor: RegionDescriptor) -> tuple[str, str, str]:
    """What a region is found by."""
    return (descriptor.peer_id, descriptor.incarnation, descriptor.region_id)
