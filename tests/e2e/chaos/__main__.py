"""`python -m tests.e2e.chaos --minutes 5 --streams 16 --seed 7`: faults by chance on real processes, and whether promises are kept."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

import msgspec

from common.runtime.clock import SystemClock
from services.launcher.console import Console
from tests.e2e.chaos.run import ChaosSettings, run_chaos
from tests.e2e.chaos.streams import REQUEST_S, STRICT_REQUEST_S


def main() -> int:
    """Run, print the report, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--decode", default="tp=1", metavar="SPEC", help="both decode workers, such as tp=4,dcp=2")
    parser.add_argument("--mixed", action="store_true", help="a mixed worker beside the others")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="streams that have begun must go on, unless outages left them less time than they need in calm",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help=f"of each request; {REQUEST_S:.0f}, and {STRICT_REQUEST_S:.0f} with --strict",
    )
    arguments = parser.parse_args()
    settings = ChaosSettings(
        seed=arguments.seed,
        num_streams=arguments.streams,
        duration_s=arguments.minutes * 60,
        transport=arguments.transport,
        strict=arguments.strict,
        request_s=arguments.deadline or (STRICT_REQUEST_S if arguments.strict else REQUEST_S),
        workers=(("prefill", "tp=2"), ("decode", arguments.decode), ("decode", arguments.decode)),
    )
    if arguments.mixed:
        settings = msgspec.structs.replace(settings, workers=(*settings.workers, ("mixed", "tp=1")))
    logging.getLogger("nats").setLevel(
        logging.CRITICAL
    )  # our own listener's connection breaks whenever the server is hit
    console = Console(SystemClock())
    report = asyncio.run(run_chaos(settings, console.say))
    console.show(report.text)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
