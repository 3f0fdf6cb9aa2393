"""Which blocks and slots of a worker's caches belong to whom. No torch: the ranks follow, in lockstep."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from contracts.errors import InvalidValueError


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence asks for: memory of `num_tokens` now, which may grow until it holds `limit_tokens`."""

    num_tokens: int
    limit_tokens: int


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one sequence owns: its blocks in the order of the sequence, its slot, and the generation that says so.

    Where states are pulled it also has a row of the staging memory, which comes and goes with the slot.
    It may grow to `limit_blocks`, and keeps its generation then: that is its name. What the cells of added blocks hold is newer.
    """

    block_ids: tuple[int, ...]
    slot: int
    generation: int
    limit_blocks: int
    staging_row: int | None = None

    @property
    def may_grow(self) -> bool:
        """Whether more blocks may be asked for."""
        return len(self.block_ids) < self.limit_blocks


class BlockPool:
    """Free and quarantined blocks and slots of one worker.

    The lowest free ids are handed out first, so that a young pool gives runs of adjacent blocks, which are cheap to copy.
    Generations come from one counter: every reservation and every return of one gets a number of its own, so that no two
    owners of a block ever share one. For each reservation that may grow, one free block is kept back from new ones: who is let
    in takes nothing away that would be missed at once. Replica `dp_rank` of `dp` counts in steps of `dp`: what is written into another replica
    than the one that granted it is refused there, too.

    Where `dcp` ranks share a sequence, an id stands for one block on each of them: it holds `block_tokens` tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        block_size: int,
        num_staging_rows: int = 0,
        dp_rank: int = 0,
        dp: int = 1,
        dcp: int = 1,
    ) -> None:
        counts = {"num_blocks": num_blocks, "num_slots": num_slots, "block_size": block_size, "dcp": dcp}
        for field, value in counts.items():
            if value < 1:
                raise InvalidValueError(field=field, value=value, rule="1 or more")
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.block_tokens = block_size * dcp
        self._free_blocks = list(range(num_blocks))
        self.num_staging_rows = num_staging_rows
        self._free_slots = list(range(num_slots))
        self._free_rows = list(range(num_staging_rows))
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
    def num_kept_blocks(self) -> int:
        """Free blocks that new reservations cannot have: one for each that may grow."""
        return min(len(self._free_blocks), sum(held.may_grow for held in self._held.values()))

    @property
    def num_free_places(self) -> int:
        """Sequences that could begin now if they found blocks: each needs a slot, and a staging row where there are any."""
        return min(len(self._free_slots), len(self._free_rows)) if self.num_staging_rows else len(self._free_slots)

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
        """Block ids that `num_tokens` fill."""
        return -(-num_tokens // self.block_tokens)

    def fits(self, num_tokens: int) -> bool:
        """Whether `reserve` would succeed now."""
        num_usable = len(self._free_blocks) - self.num_kept_blocks
        return self.num_blocks_for(num_tokens) <= num_usable and self.num_free_places > 0

    def reserve(self, need: MemoryNeed) -> Reservation | None:
        """Take the blocks of a need and a slot, or take nothing and return None when there is no room."""
        if not self.fits(need.num_tokens):
            return None
        reservation = Reservation(
            block_ids=self._take(self.num_blocks_for(need.num_tokens)),
            slot=heapq.heappop(self._free_slots),
            staging_row=heapq.heappop(self._free_rows) if self.num_staging_rows else None,
            generation=self.next_generation(),
            limit_blocks=self.num_blocks_for(need.limit_tokens),
        )
        self._held[reservation.generation] = reservation
        return reservation

    def grow(self, reservation: Reservation, most: int) -> Reservation | None:
        """Add up to `most` blocks, as many as are free and allowed, and return what is owned now; None when it is not one more.

        The caller writes a new generation into the cells of the added blocks before anything is computed in them.
        """
        num_blocks = min(most, len(self._free_blocks), reservation.limit_blocks - len(reservation.block_ids))
        if num_blocks < 1 or self._held.get(reservation.generation) != reservation:
            return None
        grown = msgspec.structs.replace(reservation, block_ids=(*reservation.block_ids, *self._take(num_blocks)))
        self._held[grown.generation] = grown
        return grown

    def next_generation(self) -> int:
        """A number above all that were given before: what the cells of returned memory are raised to."""
        self._generation += self._dp
        return self._generation

    def release(self, reservation: Reservation) -> None:
        """Return a reservation's memory. A second time changes nothing."""
        held = self._held.pop(reservation.generation, None)
        if held is not None:
            self._return(held)

    def quarantine(self, reservation: Reservation) -> None:
        """Take memory away from its owner without giving it to anybody: a writer may still be at work in it."""
        held = self._held.pop(reservation.generation, None)
        if held is not None:
            self._quarantined[held.generation] = held

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
        taken = [each.staging_row for each in everyone if each.staging_row is not None]
        rows = sorted([*self._free_rows, *taken])
        if blocks != list(range(self.num_blocks)) or slots != list(range(self.num_slots)):
            raise AssertionError("a block or slot has no place, or two")
        if rows != list(range(self.num_staging_rows)):
            raise AssertionError("a staging row has no place, or two")

    def _take(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(heapq.heappop(self._free_blocks) for _ in range(num_blocks))

    def _return(self, reservation: Reservation) -> None:
        for block in reservation.block_ids:
            heapq.heappush(self._free_blocks, block)
        heapq.heappush(self._free_slots, reservation.slot)
        if reservation.staging_row is not None:
            heapq.heappush(self._free_rows, reservation.staging_row)
