"""Running other programs: bounded in time, and with their last words when they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from compose.problem import ComposeError

DEFAULT_TIMEOUT_S: Final = 600.0
_SHOWN_CHARS: Final = 4000


def run(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stdin: str = "",
) -> str:
    """Run `command` to its end and return what it printed. Raises ComposeError if it fails or takes too long."""
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            env=None if environ is None else dict(environ),
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise ComposeError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ComposeError(f"{' '.join(command)} did not end within {timeout_s} s") from error
    if done.returncode:
        words = (done.stdout + done.stderr)[-_SHOWN_CHARS:].strip()
        raise ComposeError(f"{' '.join(command)} failed with status {done.returncode}:\n{words}")
    return done.stdout


def succeeds(command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> bool:
    """Whether `command` is there and ends well in time."""
    try:
        run(command, environ=environ, timeout_s=timeout_s)
    except ComposeError:
        return False
    return True
