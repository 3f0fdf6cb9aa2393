"""What runs in the other process of a data-plane test: `python -m tests.contract.dataplane.peer_process TRANSPORT FOLDER`.

It owns a region, prints its descriptor, then obeys one command a line from its standard input and answers each with a line:

    connect DESCRIPTOR   reach a region of the test's own process
    write                push all bytes into it
    hold                 the same, but say "in flight" after the generation has been checked and before all bytes have been copied,
                         and go on when a line comes
    unlock               break the shared-memory adapter: from now on writers take no lock
    lock                 mend it
    quit                 close everything and end
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from common.dataplane import shm_remote, tcp_segments
from common.dataplane.copier import copy_group
from common.dataplane.ofd_lock import SharedLocks
from common.dataplane.port import DataPlane, RemoteRegion
from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_vector import Vector
from common.layout.run import Run
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor
from tests.contract.dataplane.peer import CONTENT, GRANT, LENGTH

NOW = SystemClock().monotonic
RUN = Run(local_offset=0, remote_offset=0, length=LENGTH)
PATIENCE_S = 60.0


def say(text: str) -> None:
    """One line to the test."""
    print(text, flush=True)


def pause() -> None:
    """What happens in the middle of a held write."""
    say("in flight")
    sys.stdin.readline()


def held_copy(*arguments: Any, **named: Any) -> int:
    """Shared memory: between the check and the copy."""
    pause()
    return copy_group(*arguments, **named)


send = Vector.send
try_acquire, release = SharedLocks.try_acquire, SharedLocks.release


def held_send(vector: Vector, connection: socket.socket) -> int:
    """TCP: the owner has been sent the beginning of the transfer and some of its bytes."""
    if vector.num_done_bytes >= LENGTH // 2:
        set_holds(copy_group, send)
        pause()
    return send(vector, connection)


def set_holds(copy: object, push: object) -> None:
    """What copies through shared memory from now on, and what sends over TCP."""
    setattr(shm_remote, "copy_group", copy)  # noqa: B010 - the module does not export the name
    setattr(Vector, "send", push)  # noqa: B010 - the same for a method


def main(transport: str, folder: str) -> None:
    """Obey until told to quit, or until the test is gone."""
    plane: DataPlane
    if transport == "shm":
        plane = ShmDataPlane(Path(folder), peer_id="peer", incarnation="i1", now=NOW)
    else:
        plane = TcpDataPlane("127.0.0.1", peer_id="peer", incarnation="i1", now=NOW)
    setattr(tcp_segments, "SLICE_BYTES", LENGTH // 4)  # noqa: B010 - a write takes several calls, to have a middle
    region = plane.allocate(LENGTH, 4)
    region.data[:] = bytes([CONTENT]) * LENGTH
    region.open_grant(GRANT)
    remote: RemoteRegion | None = None
    say(msgspec.json.encode(region.descriptor).decode())
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "connect":
            if remote is not None:
                remote.close()
            remote = plane.connect(msgspec.json.decode(argument, type=RegionDescriptor), NOW() + PATIENCE_S)
            say("connected")
        elif command in {"write", "hold"} and remote is not None:
            if command == "hold":
                set_holds(held_copy, held_send)
            say(remote.write([RUN], region, GRANT, NOW() + PATIENCE_S).outcome.value)
            set_holds(copy_group, send)
        elif command == "unlock":
            SharedLocks.try_acquire = lambda *_: True  # type: ignore[method-assign] # to be seen to fail
            SharedLocks.release = lambda *_: None  # type: ignore[method-assign] # likewise
            say("unlocked")
        elif command == "lock":
            SharedLocks.try_acquire = try_acquire  # type: ignore[method-assign] # as it was
            SharedLocks.release = release  # type: ignore[method-assign] # likewise
            say("locked")
        elif command == "quit":
            plane.close()
            break
    say("bye")


if __name__ == "__main__":
    main(*sys.argv[1:])
