"""`python -m services.mixed`."""

import sys

from common.worker.app import run_worker
from services.mixed.service import MixedService


def main() -> None:
    """Run the service and exit with its status."""
    sys.exit(run_worker(MixedService, sys.argv[1:]))


if __name__ == "__main__":
    main()
