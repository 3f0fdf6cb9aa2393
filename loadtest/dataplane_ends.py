"""The two ends of each way to move bytes between processes that a load test compares. Each end lives in a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

import msgspec

from common.dataplane.port import SECRET_BYTES, DataPlane, Outcome, Region, WriteGrant
from common.layout.joining import batch_of
from common.layout.run import Run
from common.layout.run_batch import RunBatch
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, PdmeshError

GRANT: Final = WriteGrant(lock_cell=0, cells=(0,), generation=1, secret=bytes(SECRET_BYTES))
LOOPBACK: Final = "127.0.0.1"
LINK_S: Final = 20.0
TRANSFER_S: Final = 60.0
_now: Final = SystemClock().monotonic


class Method(StrEnum):
    """A way for bytes from one process's memory into another's."""

    MEMCPY = "memcpy"
    """Within the source's own process: what the machine can do at most."""
    SOCKET = "socket"
    """A raw blocking TCP connection, with a byte of acknowledgement: what TCP can do at most."""
    SHM = "shm"
    TCP = "tcp"
    MOONCAKE = "mooncake"


class TransferFailed(PdmeshError):  # noqa: N818 - an event that ends the test
    """Bytes did not arrive."""

    code = ErrorCode.TRANSFER_FAILED


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What a source needs in order to reach a destination's memory."""

    descriptor: RegionDescriptor | None = None
    host: str = ""
    port: int = 0
    memory: int = 0


class Destination(Protocol):
    """The end that receives: memory, and whatever serves it."""

    @property
    def data(self) -> memoryview:
        """The memory."""
        ...

    @property
    def address(self) -> Address:
        """Where it is."""
        ...

    def close(self) -> None:
        """Stop serving. Idempotent."""
        ...


class Source(Protocol):
    """The end that sends."""

    @property
    def data(self) -> memoryview:
        """The memory that it sends from."""
        ...

    def prepare(self, runs: Sequence[Run], nbytes: int) -> Callable[[], None]:
        """What sends `nbytes` bytes as `runs` say, and returns once the other end has them. It raises `TransferFailed`.

        A way that knows no pieces sends as many bytes in one, from where the first piece begins.
        """
        ...

    def close(self) -> None:
        """Let go of the other end. Idempotent."""
        ...


class PlaneDestination:
    """A region of one of our own data planes."""

    def __init__(self, plane: DataPlane, nbytes: int) -> None:
        """Owns `plane`."""
        self._plane = plane
        self._region = plane.allocate(nbytes, 1)
        self._region.open_grant(GRANT)

    @property
    def data(self) -> memoryview:
        """See `Destination.data`."""
        return self._region.data

    @property
    def address(self) -> Address:
        """See `Destination.address`."""
        return Address(descriptor=self._region.descriptor)

    def close(self) -> None:
        """See `Destination.close`."""
        self._plane.close()


class PlaneSource:
    """A region of one of our own data planes, linked with a destination's."""

    def __init__(self, plane: DataPlane, region: Region, address: Address) -> None:
        """Borrows `plane` and its `region`. Raises `DataPlaneError` when the destination cannot be reached."""
        if address.descriptor is None:
            raise TransferFailed("the destination has no region")
        self._region = region
        self._remote = plane.connect(address.descriptor, _now() + LINK_S)

    @property
    def data(self) -> memoryview:
        """See `Source.data`."""
        return self._region.data

    def prepare(self, runs: Sequence[Run], nbytes: int) -> Callable[[], None]:
        """See `Source.prepare`. Runs are worked out before, as they are for all but the first layer of a chunk."""
        return partial(self._write, batch_of(runs), nbytes)

    def close(self) -> None:
        """See `Source.close`."""
        self._remote.close()

    def _write(self, batch: RunBatch, nbytes: int) -> None:
        result = self._remote.write(batch, self._region, GRANT, _now() + TRANSFER_S)
        if result.outcome is not Outcome.DONE or result.nbytes != nbytes:
            raise TransferFailed(f"a write ended {result.outcome.value} after {result.nbytes} bytes: {result.reason}")


class MemcpySource:
    """Copies within this process, between two memories like those that a data plane uses."""

    def __init__(self, source: memoryview, target: memoryview) -> None:
        self._source = source
        self._from = address_of(source)
        self._to = address_of(target)

    @property
    def data(self) -> memoryview:
        """See `Source.data`."""
        return self._source

    def prepare(self, runs: Sequence[Run], nbytes: int) -> Callable[[], None]:
        """See `Source.prepare`."""
        local, remote = starts(runs)
        return partial(self._copy, self._to + remote, self._from + local, nbytes)

    def close(self) -> None:
        """There is no other end."""

    @staticmethod
    def _copy(to: int, origin: int, nbytes: int) -> None:
        ctypes.memmove(to, origin, nbytes)


def starts(runs: Sequence[Run]) -> tuple[int, int]:
    """Where the first byte of some runs lies at either side."""
    return min(run.local_offset for run in runs), min(run.remote_offset for run in runs)


def address_of(memory: memoryview) -> int:
    """Where writable memory lies in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
