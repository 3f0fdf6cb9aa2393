"""The sequences of a rank and the memory that each was given: no block, slot or staging row has two owners."""

from __future__ import annotations

from typing import Final

import msgspec

from common.dataplane.port import Region, WriteGrant
from common.engine.ranks.bound_sequence import BoundSequence
from common.engine.ranks.cache import LayerCaches
from common.engine.transfer.peer_table import PeerTable
from contracts.errors import InvalidValueError
from contracts.rank import BindSequence, ExtendSequences, StartRank
from contracts.requests import WorkerRef


class Bindings:
    """What `BindSequence` and `ExtendSequences` ask for, of the memory of one rank. Errors leave everything as it was."""

    def __init__(self, start: StartRank, region: Region, caches: LayerCaches, peers: PeerTable) -> None:
        self._start = start
        self._region = region
        self._caches = caches
        self._peers = peers
        self.sequences: Final[dict[int, BoundSequence]] = {}

    @property
    def staging_rows(self) -> tuple[int, ...]:
        """The rows that sequences own, in order."""
        rows = (sequence.binding.staging_row for sequence in self.sequences.values())
        return tuple(sorted(row for row in rows if row is not None))

    def find(self, seq: int) -> BoundSequence:
        """One sequence. Raises `InvalidValueError` for one that is not bound."""
        sequence = self.sequences.get(seq)
        if sequence is None:
            raise InvalidValueError(field="seq", value=seq, rule="a bound sequence")
        return sequence

    def cells(self, binding: BindSequence) -> tuple[int, ...]:
        """The header cells of a sequence: its blocks', then its slot's, whose byte is the writers' lock."""
        return (*binding.block_ids, self._start.num_blocks + binding.slot)

    def bind(self, binding: BindSequence) -> None:
        """Give a sequence its memory."""
        self._check(binding)
        peer = None
        if binding.push is not None:
            grant = binding.push.grant
            worker = WorkerRef(worker_id=grant.worker_id, incarnation=grant.incarnation)
            peer = self._peers.find(worker, grant.dp_rank)
        # States are zeroed before the cells allow anybody to write.
        self._caches.zero_slot(binding.slot)
        cells = self.cells(binding)
        if binding.secret:
            self._region.open_grant(
                WriteGrant(
                    lock_cell=cells[-1],
                    cells=cells,
                    generation=binding.generation,
                    secret=bytes.fromhex(binding.secret),
                )
            )
        else:
            self._region.set_generations(cells, binding.generation)
        self.sequences[binding.seq] = BoundSequence(binding=binding, peer=peer)

    def extend(self, command: ExtendSequences) -> None:
        """Grow sequences: the cells are written before anybody learns that the blocks are theirs."""
        added: set[int] = set()
        for extension in command.extensions:
            self.find(extension.seq)
            self._check_blocks(extension.block_ids)
            if not added.isdisjoint(extension.block_ids):
                rule = "each block once in a command"
                raise InvalidValueError(field="block_ids", value=extension.block_ids, rule=rule)
            added.update(extension.block_ids)
        self._region.set_generations(sorted(added), command.generation)
        for extension in command.extensions:
            sequence = self.sequences[extension.seq]
            blocks = (*sequence.binding.block_ids, *extension.block_ids)
            sequence.binding = msgspec.structs.replace(sequence.binding, block_ids=blocks)

    def _check(self, binding: BindSequence) -> None:
        if binding.seq in self.sequences:
            raise InvalidValueError(field="seq", value=binding.seq, rule="not bound already")
        if not 0 <= binding.slot < self._start.num_slots:
            raise InvalidValueError(field="slot", value=binding.slot, rule=f"0 to {self._start.num_slots - 1}")
        self._check_blocks(binding.block_ids)
        if binding.staging_row is not None:
            self._caches.region_map.staging.base(binding.staging_row)
        for other in self.sequences.values():
            rule = f"not held by sequence {other.binding.seq}"
            if other.binding.slot == binding.slot:
                raise InvalidValueError(field="slot", value=binding.slot, rule=rule)
            if binding.staging_row is not None and other.binding.staging_row == binding.staging_row:
                raise InvalidValueError(field="staging_row", value=binding.staging_row, rule=rule)

    def _check_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Raise `InvalidValueError` unless these are different blocks of this rank that no sequence holds."""
        blocks = set(block_ids)
        if len(blocks) != len(block_ids) or not blocks <= set(range(self._start.num_blocks)):
            rule = f"different ids from 0 to {self._start.num_blocks - 1}"
            raise InvalidValueError(field="block_ids", value=block_ids, rule=rule)
        for other in self.sequences.values():
            shared = blocks.intersection(other.binding.block_ids)
            if shared:
                rule = f"none held by sequence {other.binding.seq}"
                raise InvalidValueError(field="block_ids", value=sorted(shared), rule=rule)
