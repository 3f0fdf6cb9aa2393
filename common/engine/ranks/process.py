"""What runs in a rank's process (or, in tests, thread): one socket, one command after the other, until the parent is gone."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.dataplane.port import DataPlane
from common.engine.collectives.passed_fd import PassedFd
from common.engine.collectives.port import Collectives
from common.engine.collectives.shared_memory import SharedMemoryCollectives
from common.engine.ranks.datagrams import MAX_DATAGRAM_BYTES, Joiner, split
from common.engine.ranks.rank import Rank, RankPorts, error_info
from common.engine.transfer.transports import open_data_plane
from common.runtime.clock import Clock, SystemClock
from contracts.errors import InvalidValueError
from contracts.rank import CollectivesKind, Done, RankCommand, RankMessage, StartRank, StopRank
from contracts.rank_codec import decode_command, encode

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SEND_TIMEOUT_S: Final = 60

JoinCollectives = Callable[[StartRank], Collectives | None]
OpenDataPlane = Callable[[StartRank], DataPlane]


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """How a rank gets what its `StartRank` only names."""

    clock: Clock
    join: JoinCollectives
    open_data_plane: OpenDataPlane


def serve(connection: socket.socket, environment: RankEnvironment) -> None:
    """Answer commands from `connection` until `StopRank` or end-of-file: the parent's death is the rank's.

    The first command must be a `StartRank`; when it fails, the answer is a `Done` with the error.
    """
    # A parent that no longer reads must not hold a rank for ever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    # Threads report beside the one that answers: the datagrams of one message stay together.
    sending = threading.Lock()
    joiner = Joiner()

    def send(message: RankMessage) -> None:
        data = encode(message)
        with sending:
            for datagram in split(data):
                connection.send(datagram)

    rank: Rank | None = None
    number = -1
    try:
        while (command := _receive(connection, joiner)) is not None:
            if isinstance(command, StopRank):
                send(Done(rank=number))
                return
            if rank is not None:
                send(rank.handle(command))
                continue
            if not isinstance(command, StartRank):
                raise InvalidValueError(field="command", value=type(command).__name__, rule="StartRank comes first")
            number = command.rank
            try:
                rank = _start(command, environment, send)
            except Exception as error:  # noqa: BLE001 - the parent tells people why the worker does not start
                send(Done(rank=number, error=error_info(error)))
                continue
            send(rank.started)
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent has gone in the middle of an answer
    finally:
        if rank is not None:
            rank.close()
        connection.close()


def _receive(connection: socket.socket, joiner: Joiner) -> RankCommand | None:
    while datagram := connection.recv(MAX_DATAGRAM_BYTES):
        message = joiner.put(datagram)
        if message is not None:
            return decode_command(message)
    return None


def _start(command: StartRank, environment: RankEnvironment, send: Callable[[RankMessage], None]) -> Rank:
    data_plane = environment.open_data_plane(command)
    try:
        collectives = environment.join(command)
        try:
            return Rank(
                command,
                RankPorts(collectives=collectives, data_plane=data_plane, clock=environment.clock, emit=send),
            )
        except BaseException:
            if collectives is not None:
                # The others are told why, rather than left to wait for a rank that never comes.
                collectives.abort("a rank did not start")
                collectives.close()
            raise
    except BaseException:
        data_plane.close()
        raise


def run(connection: socket.socket, group: PassedFd | None) -> None:
    """Entry point of a rank's process; `group` is the descriptor of the shared-memory group's memory, if there is one."""
    # An interrupt from a terminal, or a service manager's SIGTERM, reaches the whole process group; the parent decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    clock = SystemClock()

    def join(command: StartRank) -> Collectives | None:
        timeout_s = command.collective_timeout_ms / 1000
        if command.tp == 1:
            return None
        match command.collectives:
            case CollectivesKind.SHARED_MEMORY if group is not None:
                return SharedMemoryCollectives.attach(
                    group.fileno(), command.rank, timeout_s=timeout_s, now=clock.monotonic
                )
            case CollectivesKind.GLOO:
                from common.engine.collectives.distributed import DistributedCollectives

                store = _file_store(command)
                return DistributedCollectives.join(
                    store, command.rank, command.tp, timeout_s=timeout_s, now=clock.monotonic
                )
            case CollectivesKind.SHARED_MEMORY:
                rule = "gloo, for a rank that was not given its group's memory"
                raise InvalidValueError(field="collectives", value=command.collectives.value, rule=rule)

    serve(
        connection,
        RankEnvironment(clock=clock, join=join, open_data_plane=lambda command: open_data_plane(command, clock)),
    )


def _file_store(command: StartRank) -> Store:
    """Where gloo ranks of one replica find each other: a file beside the transport's sockets."""
    import torch.distributed as dist

    path = str(Path(command.transport_dir) / f"gloo-{command.incarnation}-{command.dp_rank}")
    store: Store = dist.FileStore(path, command.tp)  # type: ignore[attr-defined]  # torch exports it at run time only
    return store
