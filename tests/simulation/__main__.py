"""`python -m tests.simulation SEED` replays one schedule with its trace; `--count N --first-seed S --jobs J` runs many."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.campaign import Campaign, run_campaign
from tests.simulation.coverage import coverage_lines, not_seen, owed
from tests.simulation.schedule import make_schedule
from tests.simulation.simulate import simulate


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 when an invariant was broken, or when so many schedules missed what they must have reached."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this one, and print what happens")
    parser.add_argument("--count", type=int, default=1000, help="how many schedules to run without a SEED")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that run them")
    given = parser.parse_args(argv)
    if given.seed is not None:
        return _replay(given.seed)
    total = Campaign()
    told: set[int] = set()
    for total in run_campaign(range(given.first_seed, given.first_seed + given.count), jobs=given.jobs):
        for seed in total.failures.keys() - told:
            told.add(seed)
            print(f"\nseed {seed} failed; replay it with: python -m tests.simulation {seed}")
            print("\n".join(f"    {violation}" for violation in total.failures[seed]), flush=True)
        rate = total.num_schedules / max(total.seconds, 1e-9)
        print(f"\r{total.num_schedules} schedules, {rate:.1f} a second, {len(told)} failed ", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"{total.num_schedules} schedules in {total.seconds:.1f} s, {len(total.failures)} failed")
    print("\n".join(coverage_lines(total.pairs, total.seen)))
    missed = owed(total.num_schedules, set(total.pairs))
    if missed:
        print(f"{total.num_schedules} schedules must reach every pair that can be reached; {len(missed)} were not")
    unseen = not_seen(total.num_schedules, total.seen)
    if unseen:
        print(f"in {total.num_schedules} schedules these must happen, and did not: {', '.join(unseen)}")
    return 1 if total.failures or missed or unseen else 0


def _replay(seed: int) -> int:
    schedule = make_schedule(seed)
    print(f"plot: {schedule.plot}")
    for what in (*schedule.workers, *schedule.asks, *schedule.faults):
        print(what)
    verdicts = simulate(seed, traced=True)
    print("\n".join(verdicts.lines))
    print(f"{len(verdicts.violations)} broken invariants")
    print("\n".join(f"    {violation}" for violation in verdicts.violations))
    return 1 if verdicts.violations else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
