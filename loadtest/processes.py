"""The processes of a mesh, as the kernel sees them: who descends from whom, and what each holds. Read from `/proc`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
_KIB: Final = 1024
_FORK_SERVER: Final = "multiprocessing.forkserver"
_TRACKER: Final = "multiprocessing.resource_tracker"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds. `own_bytes` is its share of memory that some process has written (PSS without mapped files).

    Mapped files, libraries above all, are in `resident_bytes` (RSS) alone: their share depends on who else on the machine maps them.
    """

    own_bytes: int
    resident_bytes: int
    num_fds: int
    num_threads: int


def name_processes(root: int) -> dict[int, str]:
    """Every process that descends from `root`, itself included, by its id: named by its service, a rank by its worker and number."""
    names = {root: "launcher"}
    for pid in sorted(_children(root)):
        service = _service(pid)
        if service is None:
            continue
        names[pid] = service
        for child in sorted(_children(pid)):
            words = _command(child)
            if any(_TRACKER in word for word in words):
                names[child] = f"{service} tracker"
            elif any(_FORK_SERVER in word for word in words):
                names[child] = f"{service} fork server"
                ranks = enumerate(sorted(_children(child)))
                names.update({rank: f"{service} rank {number}" for number, rank in ranks})
    return names


def usage(pid: int) -> Usage:
    """Look at one process. Raises `OSError` when it has ended. Takes a millisecond or a few for one with much memory."""
    rollup = _fields(_PROC / str(pid) / "smaps_rollup")
    shares = ("Pss_Anon", "Pss_Shmem")
    return Usage(
        own_bytes=sum(_KIB * int(rollup[name].split()[0]) for name in shares),
        resident_bytes=_KIB * int(rollup["Rss"].split()[0]),
        num_fds=sum(1 for _ in (_PROC / str(pid) / "fd").iterdir()),
        num_threads=int(_fields(_PROC / str(pid) / "status")["Threads"]),
    )


def _fields(file: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _children(pid: int) -> Iterator[int]:
    for task in (_PROC / str(pid) / "task").iterdir():
        try:
            yield from map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:  # a thread that has ended
            continue


def _command(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return []


def _service(pid: int) -> str | None:
    """`prefill-0` by the settings that the launcher wrote for it, `nats` for the bus; None for anything else."""
    words = _command(pid)
    if words and Path(words[0]).name == "nats-server":
        return "nats"
    after = [following for word, following in pairwise(words) if word == "--config"]
    return Path(after[0]).stem if after else None
