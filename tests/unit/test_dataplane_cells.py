"""The check of a grant's cells: every one of them counts, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dataplane.cell_check import CellCheck
from common.dataplane.shm_memory import RegionMemory, create_memory

NUM_CELLS = 1100


@pytest.fixture(scope="module")
def memory() -> Iterator[RegionMemory]:
    """A region of one byte with many cells."""
    fd = create_memory(1, NUM_CELLS)
    yield RegionMemory(fd, NUM_CELLS, 1)
    os.close(fd)


IN_ORDER = st.builds(
    lambda first, count, slot: (slot, *range(first, first + count)),
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(1000, NUM_CELLS - 1),
)
ANYWHERE = st.lists(st.integers(0, NUM_CELLS - 1), min_size=1, max_size=200).map(tuple)


@given(cells=IN_ORDER | ANYWHERE, generation=st.sampled_from([1, 7, 255, 256, 2**63, 2**64 - 1]), data=st.data())
def test_one_wrong_cell_is_enough(
    memory: RegionMemory, cells: tuple[int, ...], generation: int, data: st.DataObject
) -> None:
    """All cells with the generation: yes. Any one of them older or newer, by however little: no. Cells beside them do not matter."""
    check = CellCheck(memory, cells)
    for cell in range(NUM_CELLS):
        memory.cells[cell] = 3
    for cell in cells:
        memory.cells[cell] = generation
    assert check.all_hold(generation)
    assert not check.all_hold(generation - 1)
    memory.cells[data.draw(st.sampled_from(cells))] = generation ^ (1 << data.draw(st.integers(0, 63)))
    assert not check.all_hold(generation)
    assert not CellCheck(memory, cells).all_hold(-1)


def test_a_generation_that_no_cell_can_hold_is_refused(memory: RegionMemory) -> None:
    """A negative number or one above 64 bits matches nothing."""
    memory.cells[0] = 0
    check = CellCheck(memory, (0,))
    assert (check.all_hold(0), check.all_hold(-1), check.all_hold(2**64)) == (True, False, False)
