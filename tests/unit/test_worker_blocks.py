"""The block pool: who owns which blocks and slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.worker.core.blocks import BlockPool, Reservation
from contracts.errors import InvalidValueError


def test_a_reservation_takes_the_lowest_free_ids() -> None:
    """Adjacent blocks make cheap copies, so the lowest ids go first, also after a return."""
    pool = BlockPool(num_blocks=8, num_slots=4, block_size=16)
    first = pool.reserve(33)
    assert first is not None
    assert (first.block_ids, first.slot) == ((0, 1, 2), 0)
    second = pool.reserve(16)
    assert second is not None
    assert (second.block_ids, second.slot) == ((3,), 1)
    pool.release(first)
    third = pool.reserve(64)
    assert third is not None
    assert (third.block_ids, third.slot) == ((0, 1, 2, 4), 0)


def test_without_room_nothing_is_taken() -> None:
    """A refused reservation leaves the pool as it was, for lack of blocks and for lack of a slot."""
    pool = BlockPool(num_blocks=2, num_slots=1, block_size=16)
    assert pool.reserve(33) is None
    assert (pool.num_free_blocks, pool.num_free_slots) == (2, 1)
    assert pool.reserve(1) is not None
    assert pool.reserve(1) is None
    assert (pool.num_free_blocks, pool.num_free_slots) == (1, 0)


def test_release_twice_is_fine() -> None:
    """A second release changes nothing, even after the blocks have a new owner."""
    pool = BlockPool(num_blocks=2, num_slots=2, block_size=16)
    first = pool.reserve(32)
    assert first is not None
    pool.release(first)
    second = pool.reserve(32)
    assert second is not None
    pool.release(first)
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_quarantined_memory_belongs_to_nobody_until_its_writers_stop() -> None:
    """Quarantine takes blocks out of circulation; its end brings them back once."""
    pool = BlockPool(num_blocks=2, num_slots=2, block_size=16)
    reservation = pool.reserve(32)
    assert reservation is not None
    pool.quarantine(reservation)
    assert (pool.num_free_blocks, pool.num_quarantined_blocks) == (0, 2)
    pool.end_quarantine([reservation.generation])
    pool.end_quarantine([reservation.generation])
    assert (pool.num_free_blocks, pool.num_quarantined_blocks) == (2, 0)
    pool.check_integrity()


def test_integrity_notices_a_block_with_two_places() -> None:
    """The check is able to fail: a block that is held and free at once is found."""
    pool = BlockPool(num_blocks=2, num_slots=2, block_size=16)
    reservation = pool.reserve(16)
    assert reservation is not None
    pool._free_blocks.append(reservation.block_ids[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize("field", ["num_blocks", "num_slots", "block_size"])
def test_an_empty_pool_is_refused_by_name(field: str) -> None:
    """A count below one names its field."""
    sizes = {"num_blocks": 1, "num_slots": 1, "block_size": 1, field: 0}
    with pytest.raises(InvalidValueError, match=field):
        BlockPool(**sizes)


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "release", "quarantine", "end"]), st.integers(1, 80)), max_size=60)
)
def test_any_history_keeps_every_block_in_one_place(history: list[tuple[str, int]]) -> None:
    """Whatever is done in whatever order, no block has two owners, none is lost, and no generation is used twice."""
    pool = BlockPool(num_blocks=10, num_slots=3, block_size=16)
    live: list[Reservation] = []
    seen: set[int] = set()
    quarantined: list[Reservation] = []
    for action, number in history:
        match action:
            case "reserve":
                reservation = pool.reserve(number)
                if reservation is not None:
                    assert reservation.generation not in seen
                    seen.add(reservation.generation)
                    live.append(reservation)
            case "release" if live:
                pool.release(live.pop(number % len(live)))
            case "quarantine" if live:
                quarantined.append(live.pop(number % len(live)))
                pool.quarantine(quarantined[-1])
            case "end" if quarantined:
                pool.end_quarantine([quarantined.pop(number % len(quarantined)).generation])
        pool.check_integrity()
    owned = [block for reservation in live for block in reservation.block_ids]
    assert len(owned) == len(set(owned))
    assert pool.num_free_blocks == 10 - len(owned) - pool.num_quarantined_blocks
