"""The block pool: who owns which blocks and slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.worker.core.blocks import BlockPool, MemoryNeed, Reservation
from contracts.errors import InvalidValueError


def all_of(num_tokens: int) -> MemoryNeed:
    """Memory that never grows."""
    return MemoryNeed(num_tokens=num_tokens, limit_tokens=num_tokens)


def growing(num_tokens: int, limit_tokens: int) -> MemoryNeed:
    """Memory that may grow."""
    return MemoryNeed(num_tokens=num_tokens, limit_tokens=limit_tokens)


def test_a_reservation_takes_the_lowest_free_ids() -> None:
    """Adjacent blocks make cheap copies, so the lowest ids go first, also after a return."""
    pool = BlockPool(num_blocks=8, num_slots=4, block_size=16)
    first = pool.reserve(all_of(33))
    assert first is not None
    assert (first.block_ids, first.slot) == ((0, 1, 2), 0)
    second = pool.reserve(all_of(16))
    assert second is not None
    assert (second.block_ids, second.slot) == ((3,), 1)
    pool.release(first)
    third = pool.reserve(all_of(64))
    assert third is not None
    assert (third.block_ids, third.slot) == ((0, 1, 2, 4), 0)


def test_without_room_nothing_is_taken() -> None:
    """A refused reservation leaves the pool as it was, for lack of blocks and for lack of a slot."""
    pool = BlockPool(num_blocks=2, num_slots=1, block_size=16)
    assert pool.reserve(all_of(33)) is None
    assert (pool.num_free_blocks, pool.num_free_slots) == (2, 1)
    assert pool.reserve(all_of(1)) is not None
    assert pool.reserve(all_of(1)) is None
    assert (pool.num_free_blocks, pool.num_free_slots) == (1, 0)


def test_release_twice_is_fine() -> None:
    """A second release changes nothing, even after the blocks have a new owner."""
    pool = BlockPool(num_blocks=2, num_slots=2, block_size=16)
    first = pool.reserve(all_of(32))
    assert first is not None
    pool.release(first)
    second = pool.reserve(all_of(32))
    assert second is not None
    pool.release(first)
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_quarantined_memory_belongs_to_nobody_until_its_writers_stop() -> None:
    """Quarantine takes blocks out of circulation; its end brings them back once."""
    pool = BlockPool(num_blocks=2, num_slots=2, block_size=16)
    reservation = pool.reserve(all_of(32))
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
    reservation = pool.reserve(all_of(16))
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
    st.lists(
        st.tuples(st.sampled_from(["reserve", "grow", "release", "quarantine", "end"]), st.integers(1, 80)), max_size=60
    )
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
                reservation = pool.reserve(growing(number, 2 * number))
                if reservation is not None:
                    assert reservation.generation not in seen
                    seen.add(reservation.generation)
                    live.append(reservation)
            case "grow" if live:
                grown = pool.grow(live[number % len(live)], number % 3)
                if grown is not None:
                    live[number % len(live)] = grown
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


def test_a_reservation_grows_by_what_is_free_up_to_its_limit_and_keeps_its_name() -> None:
    """Its blocks stay where they are, new ones come behind them; a return gives all of them back, whichever state is named."""
    pool = BlockPool(num_blocks=6, num_slots=2, block_size=16)
    first = pool.reserve(growing(16, 80))
    assert first is not None
    grown = pool.grow(first, 3)
    assert grown is not None
    assert (grown.block_ids, grown.slot, grown.generation) == ((0, 1, 2, 3), 0, first.generation)
    assert pool.grow(first, 1) is None, "what it was before cannot grow again"
    last = pool.grow(grown, 3)
    assert last is not None
    assert last.block_ids == (0, 1, 2, 3, 4), "80 tokens are 5 blocks"
    assert pool.grow(last, 1) is None
    pool.release(first)
    assert (pool.num_free_blocks, pool.held) == (6, ())
    assert pool.grow(last, 1) is None, "nobody's memory does not grow"
    pool.check_integrity()


def test_nothing_grows_in_a_full_pool_and_a_little_when_little_is_free() -> None:
    """As many blocks as there are, and none at all is said."""
    pool = BlockPool(num_blocks=3, num_slots=2, block_size=16)
    first = pool.reserve(growing(16, 64))
    assert first is not None
    grown = pool.grow(first, 4)
    assert grown is not None
    assert len(grown.block_ids) == 3
    assert pool.grow(grown, 4) is None


def test_who_is_let_in_leaves_a_block_for_each_that_may_grow() -> None:
    """Else the newcomer, the youngest, would be the first to lose what it has just got."""
    pool = BlockPool(num_blocks=4, num_slots=4, block_size=16)
    first = pool.reserve(growing(16, 32))
    second = pool.reserve(growing(16, 32))
    assert first is not None
    assert second is not None
    assert (pool.num_free_blocks, pool.num_kept_blocks) == (2, 2)
    assert pool.reserve(all_of(1)) is None
    assert pool.grow(first, 1) is not None, "who grows may have what is kept"
    assert (pool.num_free_blocks, pool.num_kept_blocks) == (1, 1)
    pool.release(second)
    assert (pool.num_free_blocks, pool.num_kept_blocks) == (2, 0)
    assert pool.reserve(all_of(32)) is not None


@pytest.mark.parametrize(("num_tokens", "num_ids"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_an_id_holds_a_block_on_each_rank_that_shares_the_sequence(num_tokens: int, num_ids: int) -> None:
    """With dcp 2 a sequence needs half the ids, and so the pool holds twice the tokens."""
    pool = BlockPool(num_blocks=3, num_slots=1, block_size=16, dcp=2)
    assert pool.block_tokens == 32
    assert pool.num_blocks_for(num_tokens) == num_ids
    memory = pool.reserve(growing(num_tokens, 96))
    assert memory is not None
    assert (len(memory.block_ids), memory.limit_blocks) == (num_ids, 3)
    with pytest.raises(InvalidValueError, match="dcp"):
        BlockPool(num_blocks=3, num_slots=1, block_size=16, dcp=0)
