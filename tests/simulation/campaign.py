"""Many schedules, in several processes: what failed, how fast it went, and what has been reached."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from common.runtime.clock import SystemClock
from tests.simulation.coverage import Pair
from tests.simulation.simulate import simulate

_BATCH: Final = 10
_COLLECT_EVERY: Final = 1_000_000
"""Allocations between two collections: a schedule leaves little behind, and looking for it as often as usual takes a fifth of the time."""


class Campaign(msgspec.Struct, kw_only=True):
    """What many schedules came to.

    `pairs` counts the schedules that reached each state and event of handoffs at the broker, `seen` what happened.
    """

    num_schedules: int = 0
    failures: dict[int, list[str]] = msgspec.field(default_factory=dict)
    pairs: Counter[Pair] = msgspec.field(default_factory=Counter)
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Campaign) -> None:
        """Take in what another process has found."""
        self.num_schedules += other.num_schedules
        self.failures |= other.failures
        self.pairs += other.pairs
        self.seen += other.seen


def run_batch(seeds: range) -> Campaign:
    """Run some schedules one after the other, here."""
    found = Campaign()
    for seed in seeds:
        verdicts = simulate(seed)
        found.num_schedules += 1
        found.pairs.update(verdicts.pairs)
        found.seen += verdicts.seen
        if verdicts.violations:
            found.failures[seed] = verdicts.violations
    return found


def run_campaign(seeds: range, *, jobs: int) -> Iterator[Campaign]:
    """Run all schedules, and yield the sum of what is known after each few of them."""
    clock = SystemClock()
    began = clock.monotonic()
    total = Campaign()
    batches = [seeds[at : at + _BATCH] for at in range(0, len(seeds), _BATCH)]
    with multiprocessing.get_context("spawn").Pool(jobs, gc.set_threshold, (_COLLECT_EVERY,)) as pool:
        for found in pool.imap_unordered(run_batch, batches):
            total.add(found)
            total.seconds = clock.monotonic() - began
            yield total
