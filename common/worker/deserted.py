"""Sequences whose router has fallen silent: stopped for as long as it seems gone, and given up if that was a mistake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.worker.core.sequence import Sequence, SequenceState
from common.worker.core.table import HandoffTable
from common.worker.replica_set import ReplicaSet
from contracts.errors import ErrorCode, ErrorInfo

Fail = Callable[[tuple[Sequence, ...], ErrorInfo], Awaitable[None]]


class Deserted:
    """Those of one worker. Their memory goes by release, or at their deadline; `fail` ends them before."""

    def __init__(self, worker_id: str, table: HandoffTable, replicas: ReplicaSet, fail: Fail) -> None:
        self._worker_id = worker_id
        self._table = table
        self._replicas = replicas
        self._fail = fail

    def router_gone(self, router_id: str) -> None:
        """Stop computing for it."""
        for sequence in self._table.sequences:
            if sequence.router_id == router_id and sequence.state is not SequenceState.HELD:
                sequence.is_deserted = True
                self._replicas.of(sequence).scheduler.hold(sequence)

    async def router_heard(self, router_id: str) -> None:
        """It is there, or there again. What was stopped for it cannot go on here, and must not be waited for: it goes on elsewhere.

        Unless it has ended all the same, in the step that was under way.
        """
        deserted = tuple(
            each
            for each in self._table.sequences
            if each.router_id == router_id and each.is_deserted and not each.outcome
        )
        for sequence in deserted:
            sequence.is_deserted = False
        if deserted:
            text = f"{self._worker_id} had stopped it, because {router_id} had fallen silent and seemed gone"
            await self._fail(deserted, ErrorInfo(code=ErrorCode.PREEMPTED, message=text))
