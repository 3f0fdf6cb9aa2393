"""The `pdmesh` command."""

from __future__ import annotations

import os
import sys

from services.launcher.app import run

EXIT_UNREAD = 141
"""What a shell makes of a command that died of a closed pipe."""


def main() -> int:
    """Run what the command line asks for; the result is the exit status."""
    status = EXIT_UNREAD
    try:
        status = run()
    except* BrokenPipeError:
        # Whoever read the output has seen enough, as in `pdmesh events | head`; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(main())
