"""What `/proc` says of other processes."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from common.dataplane.shm_memory import data_offset

DEADLINE_S: Final = 60.0
_REGION: Final = "/memfd:pdmesh-region (deleted)"
_HEADER: Final = struct.Struct("<4sIQQ")


def descendants(pid: int) -> list[int]:
    """All processes below one, itself left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
        except FileNotFoundError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def state_of(pid: int) -> str:
    """The kernel's letter for a process: T is stopped, Z has ended and waits for its parent to notice; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def region_bytes(pid: int) -> bytes:
    """The data of the one cache region that a process has mapped; its header is that of `common.dataplane.shm_memory`."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.endswith(_REGION)]
    start = int(line.partition("-")[0], 16)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        _, _, num_cells, length = _HEADER.unpack(os.pread(memory, _HEADER.size, start))
        data = os.pread(memory, length, start + data_offset(num_cells))
    finally:
        os.close(memory)
    assert len(data) == length
    return data
