"""`python -m services.broker`."""

import sys

from services.broker.app import run_broker


def main() -> None:
    """Run the service and exit with its status."""
    sys.exit(run_broker(sys.argv[1:]))


if __name__ == "__main__":
    main()
