"""The memory of one shared-memory region: a sealed, prefaulted memfd with a header of generation cells before its data.

page 0      magic, version, num_cells, length
cells       u64 each; the first byte of a cell is also its lock byte
data        begins on a page, `length` bytes
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

from common.dataplane.generations import check_cells, raise_cells
from common.dataplane.port import DataPlaneError
from contracts.errors import InvalidValueError

PAGE_BYTES: Final = 4096
CELL_BYTES: Final = 8
_HEADER: Final = struct.Struct("<4sIQQ")
_MAGIC: Final = b"pdrg"
_VERSION: Final = 1
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def data_offset(num_cells: int) -> int:
    """Where the data of a region with `num_cells` cells begins in its file."""
    return PAGE_BYTES + -(-num_cells * CELL_BYTES // PAGE_BYTES) * PAGE_BYTES


def lock_offset(cell: int) -> int:
    """The file offset of a cell's lock byte."""
    return PAGE_BYTES + cell * CELL_BYTES


def create_memory(nbytes: int, num_cells: int) -> int:
    """A new memfd for `nbytes` of data and `num_cells` cells, all zero; the caller owns the descriptor.

    Its pages are reserved at once (`DataPlaneError` when the host has too few) and its size is sealed, so that no peer can make
    this process fault on a page that went away.
    """
    if nbytes <= 0:
        raise InvalidValueError(field="nbytes", value=nbytes, rule="more than 0")
    if num_cells <= 0:
        raise InvalidValueError(field="num_cells", value=num_cells, rule="more than 0")
    fd = os.memfd_create("pdmesh-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, data_offset(num_cells) + nbytes)
        os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, num_cells, nbytes), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise DataPlaneError(f"a region of {nbytes} bytes cannot be allocated: {error}") from error
    return fd


class RegionMemory:
    """A mapping of a region's file, in its owner or in a peer. It is unmapped when the last view of it is gone."""

    def __init__(self, fd: int, num_cells: int, length: int) -> None:
        """Map the region behind `fd` (borrowed). Raises `DataPlaneError` when the file is not such a region."""
        header = os.pread(fd, _HEADER.size, 0)
        expected = _HEADER.pack(_MAGIC, _VERSION, num_cells, length)
        total = data_offset(num_cells) + length
        if header != expected or os.fstat(fd).st_size < total or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise DataPlaneError(f"the peer's file is not a sealed region of {num_cells} cells and {length} bytes")
        self.num_cells: Final = num_cells
        self.length: Final = length
        self.map: Final = mmap.mmap(fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = memoryview(self.map)
        self.cells: Final = whole[PAGE_BYTES : PAGE_BYTES + num_cells * CELL_BYTES].cast("Q")
        self.data: Final = whole[data_offset(num_cells) :]
        self.base: Final = data_offset(num_cells)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + self.base

    def generation(self, cell: int) -> int:
        """The value of one generation cell. Raises `InvalidValueError` for one outside the header."""
        self.check_cells((cell,))
        return self.cells[cell]

    def check_cells(self, cells: Sequence[int]) -> None:
        """See `generations.check_cells`."""
        check_cells(self.cells, cells)

    def raise_cells(self, cells: Sequence[int], value: int) -> None:
        """See `generations.raise_cells`."""
        raise_cells(self.cells, cells, value)
