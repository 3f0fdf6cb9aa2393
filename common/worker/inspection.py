"""What a worker says of itself when it is asked: where its caches lie, and what it really holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common.worker.core.blocks import BlockPool
from common.worker.core.prompts import PromptBuffer
from common.worker.core.table import HandoffTable
from common.worker.engine_loop import EngineLoop
from common.worker.process_scan import scan_process
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.rank import RankStarted
from contracts.workers import DescribeRefused, DescribeWorker, ScanWorker, WorkerDescription, WorkerScan


class Inspection:
    """Answers the verbs `describe` and `scan`."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        ranks: tuple[RankStarted, ...],
        *,
        loop: EngineLoop,
        pool: BlockPool,
        table: HandoffTable,
        prompts: PromptBuffer,
        num_prefilled_tokens: Callable[[], int],
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._ranks = ranks
        self._loop = loop
        self._pool = pool
        self._table = table
        self._prompts = prompts
        self._num_prefilled_tokens = num_prefilled_tokens

    async def describe(self, data: bytes) -> msgspec.Struct:
        """The layout and the region of one rank."""
        rank = decode(data, DescribeWorker).rank
        if not 0 <= rank < len(self._ranks):
            message = f"rank: {rank} is not allowed; the rule is: 0 to {len(self._ranks) - 1}"
            return DescribeRefused(error=ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=message, param="rank"))
        return WorkerDescription(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            num_ranks=len(self._ranks),
            manifest=self._ranks[rank].manifest,
            region=self._ranks[rank].region,
        )

    async def scan(self, data: bytes) -> msgspec.Struct:
        """What is found by walking the tables of the worker, of its ranks, and `/proc`."""
        decode(data, ScanWorker)
        async with self._loop.lock:
            ranks = await self._loop.engine.scan()
        process = await asyncio.to_thread(scan_process)
        held = self._pool.held
        return WorkerScan(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            handoff_ids=tuple(sorted(sequence.handoff_id for sequence in self._table.sequences)),
            rank_sequences=tuple(scan.seqs for scan in ranks),
            held_blocks=tuple(sorted(block for each in held for block in each.block_ids)),
            held_slots=tuple(sorted(each.slot for each in held)),
            num_prompt_buffers=len(self._prompts),
            num_open_fds=process.num_open_fds + sum(scan.num_open_fds for scan in ranks),
            num_memfds=process.num_memfds + sum(scan.num_memfds for scan in ranks),
            num_children=process.num_children,
            num_tasks=len(asyncio.all_tasks()),
            num_prefilled_tokens=self._num_prefilled_tokens(),
        )
