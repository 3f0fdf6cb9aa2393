"""The run directory goes with the mesh, and is swept up after a launcher that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.launcher.rundir import RunDirectory, sweep


def test_nothing_is_left(tmp_path: Path) -> None:
    """Removing takes everything, and twice is fine."""
    directory = RunDirectory(tmp_path)
    (directory.logs / "a.log").write_text("x", encoding="utf-8")
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_logs_can_be_kept(tmp_path: Path) -> None:
    """After a failure the logs stay, and no later start sweeps them up."""
    directory = RunDirectory(tmp_path)
    (directory.logs / "a.log").write_text("x", encoding="utf-8")
    directory.remove(keep_logs=True)
    assert sweep(tmp_path) == []
    assert [path.relative_to(directory.path).as_posix() for path in directory.path.rglob("*")] == ["logs", "logs/a.log"]


def test_a_dead_launchers_directory_is_swept(tmp_path: Path) -> None:
    """A killed launcher cannot remove its directory: the next one does. The directory of one that lives stays."""
    program = f"""
import os
from pathlib import Path
from services.launcher.rundir import RunDirectory
directory = RunDirectory(Path({str(tmp_path)!r}))
print(directory.path, flush=True)
os._exit(9)
"""
    alive = RunDirectory(tmp_path)
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    dead = Path(killed.stdout.strip())
    assert dead.is_dir()
    assert sweep(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == [alive.path]
    alive.remove()


def test_only_our_own_are_swept(tmp_path: Path) -> None:
    """A directory without a lock, a link, and somebody else's name stay."""
    (tmp_path / "pdmesh-starting").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    (tmp_path / "pdmesh-link").symlink_to(tmp_path / "other")
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
