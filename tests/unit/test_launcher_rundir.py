"""The run directory goes with the mesh, and is swept up after a launcher that was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import InvalidValueError
from services.launcher.rundir import RunDirectory, sweep


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets; pytest's own are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_nothing_is_left(base: Path) -> None:
    """Removing takes everything, and twice is fine."""
    directory = RunDirectory(base)
    (directory.logs / "a.log").write_text("x", encoding="utf-8")
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()
    assert list(base.iterdir()) == []


def test_logs_can_be_kept(base: Path) -> None:
    """After a failure the logs stay, and no later start sweeps them up."""
    directory = RunDirectory(base)
    (directory.logs / "a.log").write_text("x", encoding="utf-8")
    directory.remove(keep_logs=True)
    assert sweep(base) == []
    assert [path.relative_to(directory.path).as_posix() for path in directory.path.rglob("*")] == ["logs", "logs/a.log"]


def test_a_dead_launchers_directory_is_swept(base: Path) -> None:
    """A killed launcher cannot remove its directory: the next one does. The directory of one that lives stays."""
    program = f"""
import os
from pathlib import Path
from services.launcher.rundir import RunDirectory
directory = RunDirectory(Path({str(base)!r}))
print(directory.path, flush=True)
os._exit(9)
"""
    alive = RunDirectory(base)
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    dead = Path(killed.stdout.strip())
    assert dead.is_dir()
    assert sweep(base) == [dead]
    assert sorted(base.iterdir()) == [alive.path]
    alive.remove()


def test_only_our_own_are_swept(base: Path) -> None:
    """A directory without a lock, a link, and somebody else's name stay."""
    (base / "pdmesh-starting").mkdir()
    (base / "other").mkdir()
    (base / "other" / "lock").touch()
    (base / "pdmesh-link").symlink_to(base / "other")
    assert sweep(base) == []
    assert len(list(base.iterdir())) == 3


def test_a_path_that_is_too_long_is_refused(base: Path) -> None:
    """Sockets in it could not be bound, which no service would explain half as well."""
    longest = base / ("x" * (55 - len(str(base)) - 1))
    longest.mkdir()
    RunDirectory(longest).remove()
    long = base / ("x" * (56 - len(str(base)) - 1))
    with pytest.raises(InvalidValueError, match=r"TMPDIR: .* at most 55 bytes"):
        RunDirectory(long)
    assert not long.exists()
