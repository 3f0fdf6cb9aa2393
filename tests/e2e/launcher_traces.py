"""What a launcher could leave behind, and how it is called."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from common.runtime.settings import environment
from services.launcher.arguments import SHIPPED_MODEL
from services.launcher.ports import free_ports


class Traces(msgspec.Struct, frozen=True, kw_only=True):
    """What a mesh could leave behind: files in its temporary folder, processes with that folder, shared memory."""

    folder: Path
    shared_before: frozenset[str]

    @classmethod
    def watch(cls, folder: Path) -> Traces:
        """Look before the mesh starts; start it with `environ`."""
        folder.mkdir()
        return cls(folder=folder, shared_before=_shared_memory())

    @property
    def environ(self) -> dict[str, str]:
        """An environment by which all processes of the mesh are known."""
        return environment() | {"TMPDIR": str(self.folder)}

    def left(self) -> list[str]:
        """Everything that is still there."""
        files = [str(path) for path in sorted(self.folder.rglob("*"))]
        processes = [f"process {pid}" for pid in self.processes()]
        return files + processes + sorted(_shared_memory() - self.shared_before)

    def processes(self) -> list[int]:
        """The processes that were started with our folder, zombies apart."""
        wanted = os.fsencode(f"TMPDIR={self.folder}")
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets; pytest's own are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def _shared_memory() -> frozenset[str]:
    folder = Path("/dev/shm")  # noqa: S108 - it is looked at only
    # A mesh has no semaphores of multiprocessing: those are of other runs on this machine, and may come at any time.
    found = (path for path in (folder.iterdir() if folder.is_dir() else ()) if not path.name.startswith("sem.mp-"))
    return frozenset(map(str, found))


class Commands:
    """Command lines of `pdmesh`, without a shell script in between."""

    def pdmesh(self, *arguments: str) -> list[str]:
        """The command with its arguments."""
        return [sys.executable, "-P", "-m", "services.launcher", *arguments]

    def small_mesh(self) -> list[str]:
        """Arguments of `up` for the smallest mesh that hands over, on a free port."""
        (port,) = free_ports(1)
        return ["--model", str(SHIPPED_MODEL), "--prefill", "--decode", "--port", str(port)]
