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

from common.dataplane.checks import check_descriptor
from common.dataplane.open_ends import OpenEnds
from common.dataplane.port import Capabilities
from common.dataplane.refusal_counts import RefusalCounts
from common.dataplane.shm_memory import data_offset
from common.dataplane.tcp_region import TcpRegion
from common.dataplane.tcp_remote import TcpRemoteRegion
from common.dataplane.tcp_server import TcpServer
from contracts.dataplane import GENERATION_BITS, RegionDescriptor

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
        self.refusals: Final = RefusalCounts()
        self.server: Final = TcpServer(host, port, now=now, refusals=self.refusals)
        shown = advertise_host or host
        self._address: Final = f"[{shown}]:{self.server.port}" if ":" in shown else f"{shown}:{self.server.port}"
        self._open: Final = OpenEnds[TcpRegion, TcpRemoteRegion]()

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

        def make(_number: int) -> TcpRegion:
            region = TcpRegion(descriptor, now=self.now, on_close=self.server.remove)
            self.server.add(region)
            return region

        return self._open.allocated(make)

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> TcpRemoteRegion:
        """Greet the owner of a region."""
        check_descriptor(descriptor, TRANSPORT)
        remote = TcpRemoteRegion(descriptor, now=self.now, deadline=deadline, stop=stop, on_close=self._open.forget)
        return self._open.connected(remote)

    def close(self) -> None:
        """Close every region and connection, stop listening, end all threads. Idempotent."""
        self._open.close()
        self.server.close()
