"""How much memory this process and its children may still take, by what Linux says of the machine and of the control group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

_AVAILABLE: Final = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_GROUP: Final = re.compile(r"^0::(/.*)$", re.MULTILINE)
_RECLAIMABLE: Final = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that is available, and what bounds it, in words."""

    num_bytes: int
    bound: str


def available_memory(root: Path = Path("/")) -> HostMemory | None:
    """The tightest of `MemAvailable` and the limits of the control group (v2) and of all groups around it; None where nothing says.

    Of a group's use its inactive file pages do not count: the kernel drops them for whoever needs memory. `root` is the file
    system to read.
    """
    return min(_bounds(root), key=lambda bound: bound.num_bytes, default=None)


def _bounds(root: Path) -> Iterator[HostMemory]:
    if found := _AVAILABLE.search(_read(root / "proc/meminfo")):
        yield HostMemory(num_bytes=int(found[1]) * 1024, bound="MemAvailable of this machine")
    group = _GROUP.search(_read(root / "proc/self/cgroup"))
    top = root / "sys/fs/cgroup"
    own = top / group[1].lstrip("/") if group else top
    # In a container the path may be the host's, and lead nowhere here: the mount itself is then the own group.
    for folder in {own, *own.parents, top}:
        if folder == top or top in folder.parents:
            yield from _group_bound(folder)


def _group_bound(folder: Path) -> Iterator[HostMemory]:
    limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return  # no limit of its own (`max`), or no such group here
    reclaimable = _RECLAIMABLE.search(_read(folder / "memory.stat"))
    taken = int(used) - (int(reclaimable[1]) if reclaimable else 0)
    yield HostMemory(num_bytes=max(0, int(limit) - taken), bound=f"the limit {folder / 'memory.max'}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
