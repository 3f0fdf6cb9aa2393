"""`python -m services.prefill`."""

import sys

from common.worker.app import run_worker
from services.prefill.service import PrefillService


def main() -> None:
    """Run the service and exit with its status."""
    sys.exit(run_worker(PrefillService, sys.argv[1:]))


if __name__ == "__main__":
    main()
