"""A seed gives the same run again, in another process, too: whatever is found can be looked at."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.simulation.simulate import simulate

_ROOT: Final = Path(__file__).parents[2]
_TIMEOUT_S: Final = 600.0
_PROGRAM: Final = """
import sys
from tests.simulation.test_simulation_replay import trace_of
print(*(trace_of(int(seed)) for seed in sys.argv[1:]), sep="\\n")
"""


def trace_of(seed: int) -> str:
    """How long the trace of a seed is, and its digest."""
    lines = simulate(seed, traced=True).lines
    return f"{len(lines)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def begin(seeds: range, *, hash_seed: int) -> subprocess.Popen[str]:
    """Begin to run schedules in a process of its own, in which sets have another order."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *map(str, seeds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.long)])
def test_a_seed_gives_the_same_run_in_another_process(seeds: range) -> None:
    """Everything follows from the seed, to the last line of the trace: nothing from the order of a set, or from what ran before."""
    other = begin(seeds, hash_seed=1)
    try:
        own = [trace_of(seed) for seed in reversed(seeds)][::-1]
        told, _ = other.communicate(timeout=_TIMEOUT_S)
    finally:
        other.kill()
    assert told.splitlines() == own
    assert all(int(each.split()[0]) > 10 for each in own)
