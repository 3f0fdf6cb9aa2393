"""`python -m common.schemas [FOLDER]` writes every schema and the AsyncAPI document, into `docs` unless told otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

from common.schemas.files import write


def main() -> int:
    """Write the files, and say where."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    print(f"{write(folder)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
