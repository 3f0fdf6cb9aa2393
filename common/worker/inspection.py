"""What a worker says of itself when it is asked: where its caches lie, and what it really holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common.worker.core.prompts import PromptBuffer
from common.worker.core.table import HandoffTable
from common.worker.process_scan import scan_process
from common.worker.replica_set import ReplicaSet
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.rank import RankScan
from contracts.workers import DescribeRefused, DescribeWorker, ScanWorker, WorkerDescription, WorkerScan


class Inspection:
    """Answers the verbs `describe` and `scan`."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        replicas: ReplicaSet,
        *,
        table: HandoffTable,
        prompts: PromptBuffer,
        num_prefilled_tokens: Callable[[], int],
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._replicas = replicas
        self._table = table
        self._prompts = prompts
        self._num_prefilled_tokens = num_prefilled_tokens

    async def describe(self, data: bytes) -> msgspec.Struct:
        """The layout and the region of one rank."""
        rank, ranks = decode(data, DescribeWorker).rank, self._replicas.ranks
        if not 0 <= rank < len(ranks):
            message = f"rank: {rank} is not allowed; the rule is: 0 to {len(ranks) - 1}"
            return DescribeRefused(error=ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=message, param="rank"))
        return WorkerDescription(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            num_ranks=len(ranks),
            manifest=ranks[rank].manifest,
            region=ranks[rank].region,
        )

    async def scan(self, data: bytes) -> msgspec.Struct:
        """What is found by walking the tables of the worker, of its ranks, and `/proc`."""
        decode(data, ScanWorker)
        ranks: list[RankScan] = []
        for replica in self._replicas:
            async with replica.loop.lock:
                ranks += await replica.engine.scan()
        process = await asyncio.to_thread(scan_process)
        return WorkerScan(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            handoff_ids=tuple(sorted(sequence.handoff_id for sequence in self._table.sequences)),
            rank_sequences=tuple(scan.seqs for scan in ranks),
            held_blocks=tuple(
                replica.dp_rank * replica.pool.num_blocks + block
                for replica in self._replicas
                for block in sorted(block for held in replica.pool.held for block in held.block_ids)
            ),
            held_slots=tuple(
                replica.dp_rank * replica.pool.num_slots + slot
                for replica in self._replicas
                for slot in sorted(held.slot for held in replica.pool.held)
            ),
            num_prompt_buffers=len(self._prompts),
            num_open_fds=process.num_open_fds + sum(scan.num_open_fds for scan in ranks),
            num_memfds=process.num_memfds + sum(scan.num_memfds for scan in ranks),
            num_children=process.num_children,
            num_tasks=len(asyncio.all_tasks()),
            num_prefilled_tokens=self._num_prefilled_tokens(),
            num_kept_blocks=sum(replica.pool.num_kept_blocks for replica in self._replicas),
        )
