"""`python -m services.decode`."""

import sys

from common.worker.app import run_worker
from services.decode.service import DecodeService


def main() -> None:
    """Run the service and exit with its status."""
    sys.exit(run_worker(DecodeService, sys.argv[1:]))


if __name__ == "__main__":
    main()
