"""The data plane of one host: shared memory, at the speed of memcpy. The default, and it needs nothing but Linux.

A writer takes a shared lock on its grant's byte, checks the generation of every cell that the grant names, copies, and lets the
byte go. A revoker raises the generations and then takes the byte exclusively: when it has it, no older writer is left. The
kernel drops the lock of a writer that dies; one that is frozen keeps it, and its revoker answers NO.

The secret of a grant is not looked at: whoever has mapped the memory could write without asking. Only processes of the same user
are given its descriptor.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.dataplane.checks import check_descriptor
from common.dataplane.fd_server import FdServer, RegionRequest, request_fd
from common.dataplane.ofd_lock import reopen
from common.dataplane.open_ends import OpenEnds
from common.dataplane.port import Capabilities, DataPlaneError
from common.dataplane.refusal_counts import RefusalCounts
from common.dataplane.shm_region import TRANSPORT, ShmRegion
from contracts.dataplane import GENERATION_BITS, RegionDescriptor

if TYPE_CHECKING:
    from common.dataplane.shm_remote import ShmRemoteRegion


class ShmDataPlane:
    """One process's end of the shared-memory transport. See `port.DataPlane`."""

    capabilities: Final = Capabilities(
        read=True,
        write=True,
        external_memory=False,
        cancel=True,
        needs_remote_progress=False,
        revocable=True,
        stops_writers=False,
        checks_secret=False,
        max_batch=1 << 20,
        device_types=("cpu",),
    )

    def __init__(self, directory: Path, *, peer_id: str, incarnation: str, now: Callable[[], float]) -> None:
        """Serve regions from a socket in `directory`, which peers must see under the same path; deadlines are on `now`'s clock."""
        self.peer_id: Final = peer_id
        self.incarnation: Final = incarnation
        self.now: Final = now
        self.refusals: Final = RefusalCounts()
        self.server: Final = FdServer(directory)
        self._open: Final = OpenEnds[ShmRegion, "ShmRemoteRegion"]()

    def allocate(self, nbytes: int, num_cells: int) -> ShmRegion:
        """Allocate, prefault and serve a region."""

        def make(number: int) -> ShmRegion:
            request = RegionRequest(
                peer_id=self.peer_id,
                incarnation=self.incarnation,
                # The ranks of a worker share its incarnation; the socket's name tells their regions apart.
                region_id=f"{self.server.path.stem}-{number}",
                generation=secrets.randbits(GENERATION_BITS),
            )
            return ShmRegion(self.server, request, nbytes, num_cells, now=self.now)

        return self._open.allocated(make)

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> ShmRemoteRegion:
        """Map a peer's region."""
        from common.dataplane.shm_remote import ShmRemoteRegion  # with numpy: only for those that move caches

        check_descriptor(descriptor, TRANSPORT)
        request = RegionRequest(
            peer_id=descriptor.peer_id,
            incarnation=descriptor.incarnation,
            region_id=descriptor.region_id,
            generation=descriptor.generation,
        )
        connection, received = request_fd(descriptor.opaque, request, self.now, deadline, stop)
        try:
            fd = reopen(received)
        except OSError as error:
            connection.close()
            raise DataPlaneError(f"the peer's descriptor cannot be opened: {error}") from error
        finally:
            os.close(received)
        try:
            remote = ShmRemoteRegion(descriptor, connection, fd, now=self.now, on_close=self._open.forget)
        except (DataPlaneError, OSError) as error:
            connection.close()
            os.close(fd)
            raise DataPlaneError(f"the peer's region cannot be mapped: {error}") from error
        return self._open.connected(remote)

    def close(self) -> None:
        """Close every region and connection, and remove the socket. Idempotent."""
        self._open.close()
        self.server.close()
