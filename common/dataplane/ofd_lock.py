"""Open-file-description byte locks (Linux): they belong to an open file, not to a process, and die with its last holder.

A descriptor that was received or duplicated shares its locks with the sender's. So every receiver opens the file anew.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from functools import lru_cache
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi4x")


def reopen(fd: int) -> int:
    """A new open file description of the file behind `fd`, with locks of its own. The caller closes both."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


@lru_cache(maxsize=1024)
def _request(kind: int, offset: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)


def try_lock(fd: int, offset: int, *, exclusive: bool) -> bool:
    """Lock one byte, shared or exclusive; False when another holder is in the way. Never waits."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(kind, offset))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, offset: int) -> None:
    """Drop the lock on one byte, if this open file holds one."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, offset))


def is_locked(fd: int, offset: int) -> bool:
    """Whether another open file holds a lock on one byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, offset))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


class SharedLocks:
    """Shared locks that several threads of a process take through one open file.

    To the kernel all of them are one holder: the first unlock would free the byte for all. So they are counted here.
    """

    def __init__(self, fd: int) -> None:
        """Borrow `fd`."""
        self._fd = fd
        self._guard = threading.Lock()
        self._holders: dict[int, int] = {}

    def try_acquire(self, offset: int) -> bool:
        """Take a share of the lock on a byte; False when a revoker holds it."""
        with self._guard:
            holders = self._holders.get(offset, 0)
            if holders == 0 and not try_lock(self._fd, offset, exclusive=False):
                return False
            self._holders[offset] = holders + 1
            return True

    def release(self, offset: int) -> None:
        """Give back one share."""
        with self._guard:
            holders = self._holders.pop(offset) - 1
            if holders:
                self._holders[offset] = holders
            else:
                unlock(self._fd, offset)
