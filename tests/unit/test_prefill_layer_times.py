"""Layer times of a prompt are summed over its chunks."""

from __future__ import annotations

from common.engine.port import StepResult
from services.prefill.layer_times import LayerTime, LayerTimes


def _step(step: int, started: tuple[tuple[int, ...], ...], ended_ns: int) -> StepResult:
    return StepResult(step=step, tokens=(), started_ns=0, ended_ns=ended_ns, layer_started_ns=started)


def test_every_chunk_counts() -> None:
    """Busy time and chunks add up; start and end are those of the last chunk, on each rank by itself."""
    times = LayerTimes()
    times.add(_step(1, ((10, 14), (11, 15)), ended_ns=20))
    times.add(_step(2, ((30, 37), (30, 36)), ended_ns=40))
    assert list(times) == [
        LayerTime(rank=0, layer=0, busy_ns=4 + 7, num_chunks=2, started_ns=30, ended_ns=37),
        LayerTime(rank=0, layer=1, busy_ns=6 + 3, num_chunks=2, started_ns=37, ended_ns=40),
        LayerTime(rank=1, layer=0, busy_ns=4 + 6, num_chunks=2, started_ns=30, ended_ns=36),
        LayerTime(rank=1, layer=1, busy_ns=5 + 4, num_chunks=2, started_ns=36, ended_ns=40),
    ]


def test_a_step_without_times_adds_nothing() -> None:
    """A chunk that completes no block has nothing to push, and its layers are not timed."""
    times = LayerTimes()
    times.add(_step(1, (), ended_ns=20))
    assert list(times) == []
