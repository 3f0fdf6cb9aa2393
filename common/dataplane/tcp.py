"""The data plane between hosts: TCP with the standard library alone. The owner of a region checks every transfer into it.

One thread at the owner serves one connection of a peer. It looks at generations, secret and bounds before it receives a byte, and
receives straight into place. A revocation ends the connections that write under the grant and waits for their threads, so a peer
that is frozen or far away does not hold memory up.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Final

from common.dataplane.port import Capabilities, DataPlaneError
from common.dataplane.shm_memory import data_offset
from common.dataplane.tcp_region import TcpRegion
from common.dataplane.tcp_remote import TcpRemoteRegion
from common.dataplane.tcp_server import TcpServer
from contracts.dataplane import DESCRIPTOR_VERSION, GENERATION_BITS, Memory, RegionDescriptor

TRANSPORT: Final = "tcp"


class TcpDataPlane:
    """One process's end of the TCP transport. See `port.DataPlane`.

    Region ids are drawn at random: whoever has not been given a descriptor cannot greet, let alone write.
    """

    capabilities: Final = Capabilities(
        read=True,
        write=True,
        external_memory=False,
        cancel=True,
        needs_remote_progress=False,
        revocable=True,
        stops_writers=True,
        checks_secret=True,
        max_batch=1 << 20,
        device_types=("cpu",),
    )

    def __init__(
        self,
        host: str,
        *,
        peer_id: str,
        incarnation: str,
        now: Callable[[], float],
        port: int = 0,
        advertise_host: str = "",
    ) -> None:
        """Listen on `host` and `port` (0: a free one), and tell peers to come to `advertise_host` ("": to `host`).

        Deadlines are on `now`'s clock. Raises `DataPlaneError` when the address cannot be used.
        """
        self.peer_id: Final = peer_id
        self.incarnation: Final = incarnation
        self.now: Final = now
        self.server: Final = TcpServer(host, port, now=now)
        shown = advertise_host or host
        self._address: Final = f"[{shown}]:{self.server.port}" if ":" in shown else f"{shown}:{self.server.port}"
        self._guard = threading.Lock()
        self._regions: list[TcpRegion] = []
        self._remotes: list[TcpRemoteRegion] = []
        self._closed = False

    def allocate(self, nbytes: int, num_cells: int) -> TcpRegion:
        """Allocate, prefault and serve a region."""
        descriptor = RegionDescriptor(
            transport=TRANSPORT,
            peer_id=self.peer_id,
            incarnation=self.incarnation,
            region_id=f"dp-{secrets.token_hex(16)}",
            generation=secrets.randbits(GENERATION_BITS),
            base=data_offset(num_cells),
            length=nbytes,
            num_cells=num_cells,
            opaque=self._address,
        )
        with self._guard:
            if self._closed:
                raise DataPlaneError("this data plane is closed")
            region = TcpRegion(descriptor, now=self.now, on_close=self.server.remove)
            self._regions.append(region)
            self.server.add(region)
            return region

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> TcpRemoteRegion:
        """Greet the owner of a region."""
        if (
            descriptor.transport != TRANSPORT
            or descriptor.version != DESCRIPTOR_VERSION
            or descriptor.memory is not Memory.HOST
        ):
            shown = f"{descriptor.transport} version {descriptor.version} in {descriptor.memory} memory"
            raise DataPlaneError(
                f"descriptor: {shown} cannot be reached; only {TRANSPORT} version {DESCRIPTOR_VERSION} in host memory"
            )
        remote = TcpRemoteRegion(descriptor, now=self.now, deadline=deadline, stop=stop, on_close=self._forget)
        with self._guard:
            self._remotes.append(remote)
            closed = self._closed
        if closed:
            remote.close()
        return remote

    def close(self) -> None:
        """Close every region and connection, stop listening, end all threads. Idempotent."""
        with self._guard:
            self._closed = True
            remotes = tuple(self._remotes)
        for remote in remotes:
            remote.close()
        for region in self._regions:
            region.close()
        self.server.close()

    def _forget(self, remote: TcpRemoteRegion) -> None:
        with self._guard:
            if remote in self._remotes:
                self._remotes.remove(remote)
