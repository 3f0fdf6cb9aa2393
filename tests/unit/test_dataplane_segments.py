"""Segments: whatever the number of runs, the same bytes go from the same places to the same places, in as few pieces as can be."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from common.dataplane.tcp_pieces import MOST_FEW
from common.dataplane.tcp_segments import Segments, segments_of
from common.layout.joining import pattern_of
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch

RUNS = st.lists(
    st.builds(
        Run,
        local_offset=st.integers(0, 9),
        remote_offset=st.integers(0, 9),
        length=st.integers(0, 4),
        count=st.integers(0, 5),
        local_stride=st.integers(0, 6),
        remote_stride=st.integers(0, 6),
    ),
    max_size=30,
)


def bytes_of(segments: Segments) -> list[tuple[int, int]]:
    """Where each byte goes, from where, in order."""
    rows = zip(*(map(int, column) for column in segments), strict=True)
    return [(local + step, remote + step) for local, remote, length in rows for step in range(length)]


def copied(runs: list[Run], local_base: int, remote_base: int) -> list[tuple[int, int]]:
    """The same, as the runs say."""
    return [
        (
            local_base + run.local_offset + item * run.local_stride + step,
            remote_base + run.remote_offset + item * run.remote_stride + step,
        )
        for run in runs
        for item in range(run.count)
        for step in range(run.length)
    ]


@settings(deadline=None)
@given(RUNS, st.sampled_from((1, 1, 8)), st.sampled_from((None, (0, 0), (100, 7))))
def test_segments_copy_what_the_runs_say(runs: list[Run], times: int, place: tuple[int, int] | None) -> None:
    """For few runs and many, single or placed as a batch; their number of bytes and the owner's table say the same."""
    local_base, remote_base = place or (0, 0)
    runs *= times
    batch = runs if place is None else RunBatch((Placed(pattern_of(runs), local_base, remote_base),))
    segments = segments_of(batch)
    expected = copied(runs, local_base, remote_base)
    assert sorted(bytes_of(segments)) == sorted(expected)
    assert segments.nbytes == len(expected)
    table = memoryview(segments.remote_table()).cast("Q").tolist()
    assert table == [int(number) for row in zip(segments.remote, segments.length, strict=True) for number in row]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.sampled_from((1, MOST_FEW)))
def test_what_lies_side_by_side_is_one_piece(lengths: list[int], times: int) -> None:
    """Few runs and many alike."""
    lengths *= times
    starts = list(accumulate(lengths, initial=0))
    runs = [
        Run(local_offset=at, remote_offset=100 + at, length=size) for at, size in zip(starts, lengths, strict=False)
    ]
    segments = segments_of(runs)
    assert [list(map(int, column)) for column in segments] == [[0], [100], [sum(lengths)]]
