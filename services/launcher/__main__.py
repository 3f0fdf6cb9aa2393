"""The `pdmesh` command."""

from __future__ import annotations

import sys

from services.launcher.app import run


def main() -> int:
    """Run what the command line asks for; the result is the exit status."""
    return run()


if __name__ == "__main__":
    sys.exit(main())
