"""Joining and cutting runs: the same bytes in fewer, bounded copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dataplane import copier, scatter
from common.dataplane.copier import Batch, join_runs, pieces
from common.dataplane.scatter import Scatter
from common.layout.run import Run

RUNS = st.lists(
    st.builds(
        Run,
        local_offset=st.integers(0, 12).map(lambda n: 4 * n),
        remote_offset=st.integers(0, 12).map(lambda n: 4 * n),
        length=st.sampled_from([0, 4, 4, 4, 8]),
        count=st.integers(0, 4),
        local_stride=st.sampled_from([0, 4, 8, -4]),
        remote_stride=st.sampled_from([0, 4, 8]),
    ),
    max_size=12,
)


def byte_pairs(runs: list[Run]) -> list[tuple[int, int]]:
    """Every byte's way, in the order of copying."""
    return [
        (run.local_offset + item * run.local_stride + byte, run.remote_offset + item * run.remote_stride + byte)
        for run in runs
        for item in range(run.count)
        for byte in range(run.length)
    ]


@given(RUNS)
def test_joined_runs_copy_the_same_bytes_in_the_same_order(runs: list[Run]) -> None:
    """Whatever is joined, each byte keeps its source, its target and its turn."""
    assert byte_pairs(list(join_runs(runs))) == byte_pairs(runs)


@given(RUNS, st.integers(1, 40))
def test_pieces_are_bounded_and_complete(runs: list[Run], chunk: int) -> None:
    """Cut runs copy the same bytes, none more than a chunk at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "CHUNK_BYTES", chunk)
        cut = list(pieces(runs))
    assert byte_pairs(cut) == byte_pairs(runs)
    assert all(0 < run.nbytes <= chunk for run in cut)


@given(RUNS, st.integers(1, 40))
def test_long_lists_move_the_same_bytes(runs: list[Run], chunk: int) -> None:
    """Handled as columns, each byte still goes its way once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MANY_RUNS", 1), ("CHUNK_BYTES", chunk)):
            patch.setattr(copier, name, value)
        for name, value in (("SCATTER_BYTES", chunk), ("_FEWEST_REGULAR", 3)):
            patch.setattr(scatter, name, value)
        cut = list(Batch(runs).pieces())
    moved = [
        pair for piece in cut for pair in (byte_pairs([piece]) if isinstance(piece, Run) else scattered_pairs(piece))
    ]
    assert sorted(moved) == sorted(byte_pairs(runs))


def scattered_pairs(piece: Scatter) -> list[tuple[int, int]]:
    """Every byte's way in a scatter."""
    places = zip(piece.local.tolist(), piece.remote.tolist(), strict=True)
    return [(local + byte, remote + byte) for local, remote in places for byte in range(piece.length)]


def test_a_long_regular_list_is_one_strided_copy() -> None:
    """Also as columns, regular pieces are found between irregular ones, and equal lengths share a scatter."""
    regular = [Run(local_offset=64 * i, remote_offset=256 * i, length=64) for i in range(1000)]
    odd = [Run(local_offset=i * i * 100, remote_offset=10**6 + 64 * i * i, length=50) for i in range(1, 100)]
    first, second = Batch([*odd[:50], *regular, *odd[50:]]).pieces()
    joined = Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=64, remote_stride=256)
    assert first == joined
    assert (isinstance(second, Scatter), second.nbytes) == (True, 50 * 99)


def test_regular_neighbours_become_one_strided_run() -> None:
    """A head's piece of each block of consecutive blocks is one copy, not a thousand."""
    runs = [Run(local_offset=64 * i, remote_offset=256 * i, length=64) for i in range(1000)]
    joined = Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=64, remote_stride=256)
    assert list(join_runs(runs)) == [joined]


def test_adjacent_pieces_become_one_piece() -> None:
    """Blocks that follow each other on both sides are one plain copy, also when they came as a strided run."""
    whole = Run(local_offset=128, remote_offset=0, length=640)
    assert list(join_runs([Run(local_offset=128 + 64 * i, remote_offset=64 * i, length=64) for i in range(10)])) == [
        whole
    ]
    strided = Run(local_offset=128, remote_offset=0, length=64, count=10, local_stride=64, remote_stride=64)
    assert list(join_runs([strided])) == [whole]
