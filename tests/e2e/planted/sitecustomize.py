"""Faults in real workers, for one test: Python imports this by its name in every process that has this folder on PYTHONPATH.

The test's folder is in `PLANTED_FOLDER`; the files in it are orders, which are obeyed from the moment at which they are there:

    freeze      the next rank that has begun to write into another worker stops itself there (SIGSTOP), and leaves `frozen` in the
                file's place, with its process id: between the check of its grant and the copy (shared memory), or when some of its
                bytes have been sent (tcp)
    unguarded   nobody waits for writers: through shared memory they take no lock, over tcp their owner forgets them

Workers bear with a pool in quarantine for longer than they would: on a busy machine a test takes its time to wake a rank.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Final

from common.dataplane import shm_remote, tcp_segments
from common.dataplane.copier import copy_group
from common.dataplane.ofd_lock import SharedLocks
from common.dataplane.port import WriteGrant
from common.dataplane.tcp_region import Landing, Stoppable, TcpRegion
from common.dataplane.tcp_vector import Vector
from common.runtime.settings import environment
from common.worker import quarantine_watch

FOLDER: Final = Path(environment()["PLANTED_FOLDER"])
TCP_SLICE_BYTES: Final = 16 << 10
QUARANTINE_S: Final = 120.0

acquire, release, send = SharedLocks.try_acquire, SharedLocks.release, Vector.send
enter, leave = TcpRegion.enter, TcpRegion.leave
unlocked: set[tuple[int, int]] = set()
forgotten: set[Landing] = set()


def freeze_if_told() -> None:
    """Of all ranks that come here after the order, one obeys it."""
    claimed = FOLDER / f"frozen-{os.getpid()}"
    try:
        (FOLDER / "freeze").rename(claimed)
    except FileNotFoundError:
        return
    claimed.write_text(str(os.getpid()), encoding="ascii")
    claimed.rename(FOLDER / "frozen")
    # To this thread, so that the signal is taken before the call returns; it stops the whole process.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def is_unguarded() -> bool:
    """Whether nobody is to wait for writers."""
    return (FOLDER / "unguarded").exists()


def copy_or_freeze(*arguments: Any, **named: Any) -> int:
    """Shared memory: after the check, with the lock held."""
    freeze_if_told()
    return copy_group(*arguments, **named)


def send_or_freeze(vector: Vector, connection: socket.socket) -> int:
    """TCP: not before the first bytes have been sent."""
    if vector.num_done_bytes:
        freeze_if_told()
    return send(vector, connection)


def acquire_or_pretend(locks: SharedLocks, offset: int) -> bool:
    """Take the lock, unless nobody is to take it."""
    if is_unguarded():
        unlocked.add((id(locks), offset))
        return True
    return acquire(locks, offset)


def release_or_pretend(locks: SharedLocks, offset: int) -> None:
    """Let go of what was taken."""
    if (id(locks), offset) in unlocked:
        unlocked.discard((id(locks), offset))
    else:
        release(locks, offset)


def enter_or_pass(region: TcpRegion, grant: WriteGrant, connection: Stoppable) -> Landing:
    """Let a write in, and remember it unless told to forget."""
    if is_unguarded():
        landing = Landing(grant, region.check(grant), connection)
        forgotten.add(landing)
        return landing
    return enter(region, grant, connection)


def leave_or_pass(region: TcpRegion, landing: Landing) -> bool:
    """What a write is worth that nobody remembered: as much as one that was."""
    if landing in forgotten:
        forgotten.discard(landing)
        return landing.cells.all_hold(landing.grant.generation)
    return leave(region, landing)


for owner, name, patched in (
    (shm_remote, "copy_group", copy_or_freeze),
    (tcp_segments, "SLICE_BYTES", TCP_SLICE_BYTES),  # a write takes several calls, to have a middle
    (quarantine_watch, "PATIENCE_S", QUARANTINE_S),
    (Vector, "send", send_or_freeze),
    (SharedLocks, "try_acquire", acquire_or_pretend),
    (SharedLocks, "release", release_or_pretend),
    (TcpRegion, "enter", enter_or_pass),
    (TcpRegion, "leave", leave_or_pass),
):
    setattr(owner, name, patched)
