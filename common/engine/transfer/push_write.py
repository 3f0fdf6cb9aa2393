"""Writing several parts of one sequence to one destination rank: one grant over all cells that they touch, one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from common.dataplane.port import Outcome, Region, TransferResult, WriteGrant
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_faults import PushFaults
from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch
from contracts.handoff import Grant


class PushPart(msgspec.Struct, frozen=True, kw_only=True):
    """What is ready of one part: the tokens of `chunk` that go to its destination, or the state in the source's `slot`."""

    copies: PartCopies
    chunk: TokenChunk | None
    slot: int

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What is to be reported: ranges of tokens, `[0, 1)` for a state."""
        return ((0, 1),) if self.chunk is None else self.copies.token_ranges(self.chunk)

    @property
    def unit_bytes(self) -> int:
        """Bytes of each token, or of the state."""
        return self.copies.state_bytes if self.chunk is None else self.copies.token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(end - start for start, end in self.ranges) * self.unit_bytes

    def place(self, dst_slot: int) -> list[Placed]:
        """The copies. Raises `InvalidValueError` for a block or slot that does not exist on its side."""
        if self.chunk is None:
            return self.copies.place_state(self.slot, dst_slot)
        return self.copies.place_tokens(self.chunk)


def write_parts(  # noqa: PLR0917 - called by the pusher alone
    peer: Peer,
    dst_rank: int,
    grant: Grant,
    parts: Sequence[PushPart],
    region: Region,
    faults: PushFaults | None,
    deadline: float,
) -> TransferResult:
    """Write `parts` from `region` under `grant`; never raises: what cannot be written has failed, and nothing is being written.

    With `faults` (that are not empty) the bytes are what those make of them.
    """
    try:
        lock_cell = peer.num_blocks + grant.slot
        own: list[Placed] = []
        writes: list[tuple[Sequence[Run], Region]] = []
        if faults:
            if any(faults.is_failed(part.copies.part) for part in parts):
                return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="planted by a failpoint")
            zeroed: list[Placed] = []
            for part in parts:
                sound, zeros = faults.writes(part, grant.slot)
                own += sound
                zeroed += zeros
            if zeroed:
                writes.append(faults.from_zeros(RunBatch(zeroed)))
        else:
            for part in parts:
                own += part.place(grant.slot)
        if own:
            writes.append((RunBatch(own), region))
        write_grant = WriteGrant(
            lock_cell=lock_cell,
            cells=cells_of(parts, lock_cell),
            generation=grant.generation,
            secret=bytes.fromhex(grant.secret),
        )
        num_bytes = 0
        for batch, source in writes:
            result = peer.regions[dst_rank].write(batch, source, write_grant, deadline)
            num_bytes += result.nbytes
            if result.outcome is not Outcome.DONE:
                return result
        return TransferResult(outcome=Outcome.DONE, nbytes=num_bytes)
    except Exception as error:  # noqa: BLE001 - whatever it was, nothing is being written, and the receiver must hear of it
        return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=reason_of(error, "a push"))


def cells_of(parts: Sequence[PushPart], lock_cell: int) -> tuple[int, ...]:
    """The slot's cell and those of all blocks that parts for one destination rank touch; the same tuple again for the same chunk."""
    found: list[tuple[int, ...]] = []
    last: TokenChunk | None = None
    for part in parts:
        if part.chunk is not None and part.chunk is not last:
            last, planned = part.chunk, part.copies.part
            found.append(last.cells(planned.modulus, planned.residue, lock_cell))
    match found:
        case []:
            return _slot_alone(lock_cell)
        case [cells] | [cells, *_] if all(other is cells for other in found):
            return cells
        case _:
            return tuple(dict.fromkeys(cell for cells in found for cell in cells))


@lru_cache(maxsize=1024)
def _slot_alone(lock_cell: int) -> tuple[int, ...]:
    return (lock_cell,)
