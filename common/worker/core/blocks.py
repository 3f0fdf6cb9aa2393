"""Which blocks and slots of a worker's caches belong to whom. No torch: the ranks follow, in lockstep."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from contracts.errors import InvalidValueError


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one sequence owns: its blocks in the order of the sequence, its slot, and the generation that says so."""

    block_ids: tuple[int, ...]
    slot: int
    generation: int


class BlockPool:
    """Free and quarantined blocks and slots of one worker.

    The lowest free ids are handed out first, so that a young pool gives runs of adjacent blocks, which are cheap to copy.
    Generations come from one counter: every reservation and every return of one gets a number of its own, so that no two
    owners of a block ever share one. Replica `dp_rank` of `dp` counts in steps of `dp`: what is written into another replica
    than the one that granted it is refused there, too.
    """

    def __init__(self, *, num_blocks: int, num_slots: int, block_size: int, dp_rank: int = 0, dp: int = 1) -> None:
        for field, value in (("num_blocks", num_blocks), ("num_slots", num_slots), ("block_size", block_size)):
            if value < 1:
                raise InvalidValueError(field=field, value=value, rule="1 or more")
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.block_size = block_size
        self._free_blocks = list(range(num_blocks))
        self._free_slots = list(range(num_slots))
        self._generation = dp_rank
        self._dp = dp
        self._held: dict[int, Reservation] = {}
        self._quarantined: dict[int, Reservation] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation could have now."""
        return len(self._free_blocks)

    @property
    def num_free_slots(self) -> int:
        """Slots that a reservation could have now."""
        return len(self._free_slots)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that nobody owns but some writer may still touch."""
        return sum(len(reservation.block_ids) for reservation in self._quarantined.values())

    @property
    def num_quarantined_slots(self) -> int:
        """Slots that nobody owns but some writer may still touch."""
        return len(self._quarantined)

    @property
    def held(self) -> tuple[Reservation, ...]:
        """Every reservation that has an owner."""
        return tuple(self._held.values())

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` fill."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether `reserve` would succeed now."""
        return self.num_blocks_for(num_tokens) <= len(self._free_blocks) and bool(self._free_slots)

    def reserve(self, num_tokens: int) -> Reservation | None:
        """Take blocks for `num_tokens` and a slot, or take nothing and return None when there is no room."""
        if not self.fits(num_tokens):
            return None
        blocks = tuple(heapq.heappop(self._free_blocks) for _ in range(self.num_blocks_for(num_tokens)))
        slot = heapq.heappop(self._free_slots)
        reservation = Reservation(block_ids=blocks, slot=slot, generation=self.next_generation())
        self._held[reservation.generation] = reservation
        return reservation

    def next_generation(self) -> int:
        """A number above all that were given before: what the cells of returned memory are raised to."""
        self._generation += self._dp
        return self._generation

    def release(self, reservation: Reservation) -> None:
        """Return a reservation's memory. A second time changes nothing."""
        if self._held.pop(reservation.generation, None) is not None:
            self._return(reservation)

    def quarantine(self, reservation: Reservation) -> None:
        """Take memory away from its owner without giving it to anybody: a writer may still be at work in it."""
        if self._held.pop(reservation.generation, None) is not None:
            self._quarantined[reservation.generation] = reservation

    def end_quarantine(self, generations: Iterable[int]) -> None:
        """Return quarantined memory whose writers are known to be quiescent."""
        for generation in generations:
            reservation = self._quarantined.pop(generation, None)
            if reservation is not None:
                self._return(reservation)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block and slot is in exactly one place."""
        everyone = [*self._held.values(), *self._quarantined.values()]
        blocks = sorted([*self._free_blocks, *(block for each in everyone for block in each.block_ids)])
        slots = sorted([*self._free_slots, *(each.slot for each in everyone)])
        if blocks != list(range(self.num_blocks)) or slots != list(range(self.num_slots)):
            raise AssertionError("a block or slot has no place, or two")

    def _return(self, reservation: Reservation) -> None:
        for block in reservation.block_ids:
            heapq.heappush(self._free_blocks, block)
        heapq.heappush(self._free_slots, reservation.slot)
