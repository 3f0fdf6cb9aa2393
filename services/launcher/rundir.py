"""The directory of one mesh: what its processes put into files lies here, and goes with it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from contracts.errors import InvalidValueError

_PREFIX: Final = "pdmesh-"
_LOCK: Final = "lock"
# A socket's path has at most 107 bytes; the longest in here is pdmesh-xxxxxxxx/tmp/pymp-xxxxxxxx/listener-xxxxxxxx.
_MAX_BASE_BYTES: Final = 107 - len("/pdmesh-xxxxxxxx/tmp/pymp-xxxxxxxx/listener-xxxxxxxx")


class RunDirectory:
    """A private directory (mode 0700) that lives as long as the mesh.

    `path/logs` holds the services' logs, `path/settings` what each was started with, `path/tmp` is their TMPDIR,
    `path/nats` the server's store. A lock tells living directories from those whose launcher was killed.
    Raises InvalidValueError for a `base` whose path is too long.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = Path(tempfile.gettempdir()) if base is None else base
        self._lock: int | None = None
        if len(os.fsencode(self._base)) > _MAX_BASE_BYTES:
            rule = f"a path of at most {_MAX_BASE_BYTES} bytes, since the mesh's sockets lie in it"
            raise InvalidValueError(field="TMPDIR", value=str(self._base), rule=rule)
        sweep(self._base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base))
        # Locked before it gets its name, so that no sweep can find it unlocked.
        unnamed = self.path / "lock.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)
        for name in ("logs", "settings", "tmp", "nats"):
            (self.path / name).mkdir()

    @property
    def logs(self) -> Path:
        """Where each service's log lies, as `NAME.log`."""
        return self.path / "logs"

    def remove(self, *, keep_logs: bool = False) -> None:
        """Remove everything, or everything but the logs. Twice is fine."""
        if keep_logs:
            for each in self.path.iterdir():
                if each != self.logs:
                    _delete(each)
        else:
            _delete(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(base: Path) -> list[Path]:
    """Remove the directories in `base` whose launcher no longer lives, and return them.

    Directories of other users stay, and so do those without a lock: they are being made, or are logs that were kept.
    """
    removed = []
    for path in sorted(base.glob(f"{_PREFIX}*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _delete(path)
            removed.append(path)
        finally:
            os.close(lock)
    return removed


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
