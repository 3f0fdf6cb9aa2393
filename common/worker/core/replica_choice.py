"""Which replica of a worker takes new work: the least loaded one by what the work needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has, has left, and is doing. `num_prompt_tokens_left` are prompt tokens that are still to be computed.

    Of the free blocks, `num_kept_blocks` are for sequences that grow.
    """

    dp_rank: int
    num_blocks: int
    num_slots: int
    num_free_blocks: int
    num_free_slots: int
    num_waiting: int
    num_running: int
    num_prompt_tokens_left: int
    num_kept_blocks: int = 0

    @property
    def num_usable_blocks(self) -> int:
        """Free blocks that a new sequence could have now."""
        return self.num_free_blocks - self.num_kept_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether a sequence of so many blocks would get its memory now."""
        return num_blocks <= self.num_usable_blocks and self.num_free_slots > 0

    @property
    def used(self) -> int:
        """How full it is by what it is shortest of, blocks or slots, in units that are the same for replicas of one size."""
        return max(
            (self.num_blocks - self.num_free_blocks) * self.num_slots,
            (self.num_slots - self.num_free_slots) * self.num_blocks,
        )


def choose_for_memory(loads: Iterable[ReplicaLoad], num_blocks: int) -> int | None:
    """The emptiest replica that has so many blocks and a slot now, the lowest of equal ones; None when none has."""
    fitting = [load for load in loads if load.has_room(num_blocks)]
    return min(fitting, key=lambda load: (load.used, load.dp_rank)).dp_rank if fitting else None


def choose_for_prompt(loads: Iterable[ReplicaLoad], num_blocks: int) -> int:
    """Where a prompt is computed soonest: where it need not wait for memory, and the fewest prompt tokens come before it.

    Equal ones are told apart by how many sequences they have, then the lowest is taken. The prompt may have to wait there.
    """

    def rank(load: ReplicaLoad) -> tuple[bool, int, int, int]:
        waits = load.num_waiting > 0 or not load.has_room(num_blocks)
        return waits, load.num_prompt_tokens_left, load.num_waiting + load.num_running, load.dp_rank

    return min(loads, key=rank).dp_rank
