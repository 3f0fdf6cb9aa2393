"""The memory that the ranks of one group share: control words, one pair of slots a rank, and who is still alive.

One memfd, made by the parent and handed to each rank as a descriptor; nothing is left behind after a crash. Layout:

    page 0                 magic, size, levels, slot bytes | abort word | abort reason | one lock byte a rank
    levels x size x 64 B   control line of a rank: arrived, tag of even and of odd generations, joined
    levels x size x 2      slots, each `slot_bytes`

Level 0 is the whole group; each split uses one more level, in which disjoint sub-groups use the lines of their own members.
A rank proves that it lives by an open-file-description lock on its byte: the kernel drops it within milliseconds of a death.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Final

from common.dataplane.ofd_lock import is_locked, reopen, try_lock
from common.engine.collectives import futex
from common.engine.collectives.port import CollectiveAbortedError
from contracts.errors import InvalidValueError

PAGE_BYTES: Final = 4096
LINE_WORDS: Final = 16
ARRIVED: Final = 0
TAG: Final = 1
JOINED: Final = 3
"""Positions of the words in a rank's control line; TAG is two words, by parity of the generation."""

_HEADER: Final = struct.Struct("<4sIIIQ")
_MAGIC: Final = b"pdcg"
_VERSION: Final = 1
_ABORT_WORD: Final = 16
_REASON_OFFSET: Final = 128
_REASON_BYTES: Final = 512
_LOCK_OFFSET: Final = 2048
MAX_RANKS: Final = 256
DEFAULT_SLOT_BYTES: Final = 1 << 18


class GroupMemory:
    """A mapping of one group's memory, in the parent (`create`) or in a rank (`attach`)."""

    def __init__(self, fd: int) -> None:
        """Map the memory behind `fd`, which this object owns from now on."""
        self._fd = fd
        header = os.pread(fd, _HEADER.size, 0)
        magic, version, size, num_levels, slot_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != _VERSION:
            raise InvalidValueError(
                field="fd", value=fd, rule="a descriptor made by GroupMemory.create of this version"
            )
        self.size: Final[int] = size
        self.num_levels: Final[int] = num_levels
        self.slot_bytes: Final[int] = slot_bytes
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, _total_bytes(size, num_levels, slot_bytes), flags=flags)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes: Final = memoryview(self._map)
        self.words: Final = self.bytes[: PAGE_BYTES + num_levels * size * LINE_WORDS * 4].cast("I")

    @classmethod
    def create(cls, size: int, *, slot_bytes: int = DEFAULT_SLOT_BYTES, num_splits: int = 1) -> GroupMemory:
        """Memory for `size` ranks whose group may be split `num_splits` times. Tensors over `slot_bytes` go in chunks.

        The descriptor to hand to the ranks is `fileno()`; the parent closes this object when the ranks have gone.
        """
        if not futex.SUPPORTED:
            raise InvalidValueError(
                field="machine", value=futex.MACHINE, rule="x86_64 or aarch64 for shared-memory collectives"
            )
        if not 1 <= size <= MAX_RANKS:
            raise InvalidValueError(field="size", value=size, rule=f"1 to {MAX_RANKS} ranks")
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
            raise InvalidValueError(field="slot_bytes", value=slot_bytes, rule=f"a positive multiple of {PAGE_BYTES}")
        if num_splits < 0:
            raise InvalidValueError(field="num_splits", value=num_splits, rule="0 or more")
        fd = os.memfd_create("pdmesh-collectives")
        try:
            os.posix_fallocate(fd, 0, _total_bytes(size, 1 + num_splits, slot_bytes))
            os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, size, 1 + num_splits, slot_bytes), 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, rank: int) -> GroupMemory:
        """Join as `rank` through a descriptor got from the parent, which stays the caller's to close.

        Raises `CollectiveAbortedError` when that rank has joined before: a group cannot be joined twice.
        """
        # A received descriptor shares its locks with the sender's; one opened anew has its own.
        memory = cls(reopen(fd))
        if not 0 <= rank < memory.size:
            memory.close()
            raise InvalidValueError(field="rank", value=rank, rule=f"0 to {memory.size - 1}")
        joined = memory.line(0, rank) + JOINED
        if not try_lock(memory.fileno(), _LOCK_OFFSET + rank, exclusive=True) or memory.words[joined]:
            memory.close()
            raise CollectiveAbortedError(f"rank {rank} has already joined this group")
        memory.words[joined] = 1
        return memory

    def fileno(self) -> int:
        """The descriptor of the memory."""
        return self._fd

    def line(self, level: int, rank: int) -> int:
        """Index in `words` of the control line of `rank` at `level`."""
        return PAGE_BYTES // 4 + (level * self.size + rank) * LINE_WORDS

    def slot(self, level: int, rank: int, parity: int) -> int:
        """Byte offset of a slot."""
        return _slots_offset(self.size, self.num_levels) + ((level * self.size + rank) * 2 + parity) * self.slot_bytes

    @property
    def aborted(self) -> bool:
        """Whether somebody has aborted the group, or this end has been closed."""
        return self._fd < 0 or bool(self.words[_ABORT_WORD])

    @property
    def abort_reason(self) -> str:
        """Why the group was aborted: the first reason that was given, or "" (also while it is being written)."""
        if self._fd < 0:
            return "this end has left it"
        raw = bytes(self.bytes[_REASON_OFFSET : _REASON_OFFSET + _REASON_BYTES])
        return raw.partition(b"\0")[0].decode(errors="replace")

    def abort(self, reason: str) -> None:
        """Fail the group for all ranks and wake those that wait. Idempotent: the first reason stays."""
        if not self.words[_ABORT_WORD]:
            raw = reason.encode()[: _REASON_BYTES - 1]
            self.bytes[_REASON_OFFSET : _REASON_OFFSET + len(raw)] = raw
            futex.fence()
            self.words[_ABORT_WORD] = 1
        for level in range(self.num_levels):
            for rank in range(self.size):
                futex.futex_wake(self.address + 4 * (self.line(level, rank) + ARRIVED))

    def has_gone(self, rank: int) -> bool:
        """Whether `rank` had joined and has left or died since."""
        if not self.words[self.line(0, rank) + JOINED]:
            return False
        try:
            return not is_locked(self._fd, _LOCK_OFFSET + rank)
        except OSError:
            return True  # this end is closed

    def close(self) -> None:
        """Leave: peers that wait for this rank fail. Idempotent. The mapping goes when the last view of it does."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _slots_offset(size: int, num_levels: int) -> int:
    lines = num_levels * size * LINE_WORDS * 4
    return PAGE_BYTES + -(-lines // PAGE_BYTES) * PAGE_BYTES


def _total_bytes(size: int, num_levels: int, slot_bytes: int) -> int:
    return _slots_offset(size, num_levels) + num_levels * size * 2 * slot_bytes
