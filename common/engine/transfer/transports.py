"""Opens the data plane that a rank's start names."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from common.dataplane.port import DataPlane
from common.dataplane.shm import ShmDataPlane
from common.runtime.clock import Clock
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.rank import StartRank


def open_data_plane(command: StartRank, clock: Clock) -> DataPlane:
    """This rank's end of `command.transport`.

    Raises `InvalidValueError` for a transport that there is not, `DataPlaneError` when its folder or address cannot be used.
    """
    try:
        transport = Transport(command.transport)
    except ValueError as error:
        rule = f"one of {', '.join(Transport)}"
        raise InvalidValueError(field="transport", value=command.transport, rule=rule) from error
    match transport:
        case Transport.SHM:
            if not command.transport_dir:
                rule = "a folder that all workers of this host share"
                raise InvalidValueError(field="transport_dir", value="", rule=rule)
            return ShmDataPlane(
                Path(command.transport_dir),
                peer_id=command.worker_id,
                incarnation=command.incarnation,
                now=clock.monotonic,
            )
        case Transport.TCP:
            from common.dataplane.tcp import TcpDataPlane  # a worker of one host never needs it

            return TcpDataPlane(
                command.transport_host,
                advertise_host=command.transport_advertise_host,
                peer_id=command.worker_id,
                incarnation=command.incarnation,
                now=clock.monotonic,
            )
        case _:
            assert_never(transport)
