"""Joining, placing, measuring and copying runs: the same bytes in fewer, bounded copies."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dataplane import copier
from common.dataplane.checks import check_runs
from common.dataplane.copier import copy_group, groups_of
from common.dataplane.shm_memory import RegionMemory, create_memory
from common.layout import joining
from common.layout.joining import batch_of, join_runs, pattern_of
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch, RunPattern, Scatter
from contracts.errors import InvalidValueError

LENGTH = 4096

RUNS = st.lists(
    st.builds(
        Run,
        local_offset=st.integers(3, 12).map(lambda n: 4 * n),
        remote_offset=st.integers(0, 12).map(lambda n: 4 * n),
        length=st.sampled_from([0, 4, 4, 4, 8]),
        count=st.integers(0, 4),
        local_stride=st.sampled_from([0, 4, 8, -4]),
        remote_stride=st.sampled_from([0, 4, 8]),
    ),
    max_size=12,
)


def byte_pairs(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Every byte's way, in the order of copying."""
    return [
        (run.local_offset + item * run.local_stride + byte, run.remote_offset + item * run.remote_stride + byte)
        for run in runs
        for item in range(run.count)
        for byte in range(run.length)
    ]


def grouped(batch: RunBatch, chunk: int) -> list[list[Run]]:
    """The groups that are copied between two looks at the grant, as runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "CHUNK_BYTES", chunk)
        return [list(RunBatch(group)) for group in groups_of(batch)]


@given(RUNS)
def test_joined_runs_copy_the_same_bytes_in_the_same_order(runs: list[Run]) -> None:
    """Whatever is joined, each byte keeps its source, its target and its turn."""
    assert byte_pairs(list(join_runs(runs))) == byte_pairs(runs)


@given(RUNS, st.integers(1, 40), st.sampled_from([1, 100]))
def test_groups_are_bounded_and_complete(runs: list[Run], chunk: int, many: int) -> None:
    """Few runs or many (as columns): each byte goes its way once, and no group moves more than a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "MANY_RUNS", many)
        patch.setattr(joining, "_FEWEST_REGULAR", 3)
        batch = batch_of(runs)
    groups = grouped(batch, chunk)
    assert sorted(byte_pairs([run for group in groups for run in group])) == sorted(byte_pairs(runs))
    assert sorted(byte_pairs(batch)) == sorted(byte_pairs(runs))
    assert batch.nbytes == sum(run.nbytes for run in runs)
    # A scatter is never cut inside a piece, of which none is longer than 48 bytes here.
    assert all(0 < sum(run.nbytes for run in group) <= max(chunk, 48) for group in groups)


@given(RUNS, st.integers(-60, 60), st.integers(-60, 60), st.integers(1, 120), st.integers(1, 120))
def test_a_pattern_is_within_bounds_when_every_run_is(
    runs: list[Run], local_base: int, remote_base: int, local_length: int, remote_length: int
) -> None:
    """The span of a placed pattern refuses exactly what the runs themselves are refused for, and the refusal names a run."""
    batch = RunBatch((Placed(pattern_of(runs), local_base, remote_base),))
    pairs = byte_pairs(tuple(batch))
    within = all(0 <= here < local_length and 0 <= there < remote_length for here, there in pairs)
    refused = check_runs(batch, local_length, remote_length)
    assert bool(refused) is not within
    assert refused == check_runs(tuple(batch), local_length, remote_length)


@pytest.fixture(scope="module")
def memories() -> tuple[RegionMemory, RegionMemory]:
    """A source and a target."""
    made = []
    for _ in range(2):
        fd = create_memory(LENGTH, 1)
        made.append(RegionMemory(fd, 1, LENGTH))
        os.close(fd)
    return made[0], made[1]


SCATTERS = st.builds(
    lambda length, places, aligned: Scatter(
        length, *(np.array(side, np.int64) * (length if aligned else 1) for side in zip(*places, strict=True))
    ),
    st.sampled_from([1, 3, 8, 16, 24]),
    st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=20, unique_by=lambda pair: pair[1]
    ),
    st.booleans(),
)


@given(SCATTERS, st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_scatters_move_exactly_their_bytes(
    memories: tuple[RegionMemory, RegionMemory], scatter: Scatter, local_base: int, remote_base: int, to_remote: bool
) -> None:
    """Aligned or not, regular on a side or not, through the buffer in several rounds, in both directions, at any base."""
    here, there = memories
    source, target = (here, there) if to_remote else (there, here)
    source.data[:] = bytes(index * 31 % 251 for index in range(LENGTH))
    target.data[:] = bytes([0xEE]) * LENGTH
    expected = bytearray(target.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "BUFFER_BYTES", 64)
        assert (
            copy_group([Placed(RunPattern([scatter]), local_base, remote_base)], here, there, to_remote=to_remote)
            == scatter.nbytes
        )
    written: set[int] = set()
    ambiguous: set[int] = set()
    for local, remote in byte_pairs(list(scatter.runs())):
        read, write = (
            (local + local_base, remote + remote_base) if to_remote else (remote + remote_base, local + local_base)
        )
        if write in written and expected[write] != source.data[read]:
            ambiguous.add(write)  # two pieces wrote it, in whichever order
        written.add(write)
        expected[write] = source.data[read]
    for place in range(LENGTH):
        assert place in ambiguous or target.data[place] == expected[place]


@pytest.mark.parametrize("length", [8192, 8191])
def test_long_copies_have_enough_items_for_numpy_to_free_the_interpreter_lock(length: int) -> None:
    """Below 500 items numpy keeps the lock, however large they are, and the computation would wait for the copy."""
    fd = create_memory(4 * length, 1)
    memory = RegionMemory(fd, 1, 4 * length)
    os.close(fd)
    sizes: list[int] = []

    def record(target: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], source: object) -> None:
        sizes.append(target.size)

    strided = Run(local_offset=0, remote_offset=0, length=length, count=5, local_stride=0, remote_stride=0)
    flat = Run(local_offset=0, remote_offset=0, length=3 * length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "copyto", record)
        copy_group([Placed(RunPattern([strided, flat]))], memory, memory, to_remote=True)
    assert len(sizes) == 2
    assert min(sizes) > 500


def test_a_long_regular_list_is_one_strided_copy() -> None:
    """Also as columns, regular pieces are found between irregular ones, and equal lengths share a scatter."""
    regular = [Run(local_offset=64 * i, remote_offset=256 * i, length=64) for i in range(1000)]
    odd = [Run(local_offset=i * i * 100, remote_offset=10**6 + 64 * i * i, length=50) for i in range(1, 100)]
    first, second = pattern_of([*odd[:50], *regular, *odd[50:]]).pieces
    joined = Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=64, remote_stride=256)
    assert first == joined
    assert (isinstance(second, Scatter), second.nbytes) == (True, 50 * 99)


def test_regular_neighbours_become_one_strided_run() -> None:
    """A head's piece of each block of consecutive blocks is one copy, not a thousand."""
    runs = [Run(local_offset=64 * i, remote_offset=256 * i, length=64) for i in range(1000)]
    joined = Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=64, remote_stride=256)
    assert list(join_runs(runs)) == [joined]
    assert pattern_of(runs).pieces == (joined,)


def test_adjacent_pieces_become_one_piece() -> None:
    """Blocks that follow each other on both sides are one plain copy, also when they came as a strided run."""
    whole = Run(local_offset=128, remote_offset=0, length=640)
    pieces = [Run(local_offset=128 + 64 * i, remote_offset=64 * i, length=64) for i in range(10)]
    strided = Run(local_offset=128, remote_offset=0, length=64, count=10, local_stride=64, remote_stride=64)
    assert list(join_runs(pieces)) == [whole]
    assert pattern_of(pieces * 2).pieces == (whole, whole)
    assert list(join_runs([strided])) == [whole]


def test_patterns_refuse_what_they_cannot_measure() -> None:
    """Empty pieces and negative offsets of scatters are errors, not surprises later."""
    with pytest.raises(InvalidValueError, match="more than 0"):
        RunPattern([Run(local_offset=0, remote_offset=0, length=0)])
    for local in ([-1, 0], [0], []):
        with pytest.raises(InvalidValueError, match="scatter"):
            Scatter(4, np.array(local, np.int64), np.array([0, 4], np.int64))
