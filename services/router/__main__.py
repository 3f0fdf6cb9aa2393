"""`python -m services.router [SPEC] [--set KEY=VALUE] [--config FILE]`."""

import os
import sys

from common.runtime.clock import SystemClock
from common.runtime.lifecycle import EXIT_SETTINGS, Lifecycle, run_service
from common.runtime.logging import configure_logging
from common.runtime.settings import SettingsError, load_from_arguments
from services.router.app import connect_and_start
from services.router.settings import RouterSettings


def main() -> int:
    """Run a router to its end, and return the exit status."""
    try:
        settings = load_from_arguments(RouterSettings, role="router", argv=sys.argv[1:]).value
    except SettingsError as error:
        print(error, file=sys.stderr)
        return EXIT_SETTINGS
    log = configure_logging("router", level=settings.log_level, router_id=settings.router_id)
    clock = SystemClock()

    async def live(lifecycle: Lifecycle) -> None:
        await connect_and_start(settings, lifecycle, clock=clock, log=log, entropy=os.urandom)

    return run_service(live, log=log, drain_timeout_s=settings.drain_timeout_s)


if __name__ == "__main__":
    sys.exit(main())
