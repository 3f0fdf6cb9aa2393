"""What a pusher says of its tasks. Saying it never fails: a thread that pushes, and a step that queues, go on without a listener."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer.failure_reason import reason_of
from common.engine.transfer.push_task import PushTask
from common.engine.transfer.push_write import PushPart
from common.runtime.clock import Clock
from contracts.rank import PartPushed, PushOutcome


class PushReporter:
    """Tells of one rank's pushes. For any thread; it waits as long as `emit` does.

    Every method returns why something could not be told, or nothing.
    """

    def __init__(self, rank: int, clock: Clock, emit: Callable[[PartPushed], None]) -> None:
        self._rank = rank
        self._clock = clock
        self._emit = emit

    def ended(
        self,
        items: Sequence[tuple[PushTask, PushPart]],
        outcome: PushOutcome,
        result: TransferResult,
        began_ns: int,
    ) -> str:
        """Parts of one write, which has just ended, one by one."""
        took_ns = self._clock.monotonic_ns() - began_ns
        total = sum(part.num_bytes for _, part in items) or 1
        before = 0
        lost = ""
        for task, part in items:
            for start, end in part.ranges:
                num_bytes = (end - start) * part.unit_bytes
                # The time of the whole write, shared out by bytes: the sum over all parts stays the time that was spent.
                started_ns = began_ns + took_ns * before // total
                before += num_bytes
                planned = part.copies.part
                why = self._tell(
                    PartPushed(
                        rank=self._rank,
                        seq=task.seq,
                        handoff_id=task.handoff_id,
                        namespace=planned.namespace,
                        role=planned.role,
                        layer=planned.layer,
                        destination_rank=planned.dst_rank,
                        start=start,
                        end=end,
                        num_bytes=num_bytes if result.outcome is Outcome.DONE else 0,
                        queued_ns=task.queued_ns,
                        started_ns=started_ns,
                        done_ns=began_ns + took_ns * before // total,
                        outcome=outcome,
                        reason=result.reason,
                    )
                )
                lost = lost or why
        return lost

    def failed(self, task: PushTask, reason: str, *, is_unclear: bool = False) -> str:
        """A task of which nobody asks any more what it owes to whom: one report says that its sequence has failed.

        With `is_unclear` something of it may still be moving.
        """
        now_ns = self._clock.monotonic_ns()
        start, end = (0, 1) if task.chunk is None else (task.chunk.start, task.chunk.end)
        return self._tell(
            PartPushed(
                rank=self._rank,
                seq=task.seq,
                handoff_id=task.handoff_id,
                namespace=task.namespace,
                role=task.role,
                layer=task.layer,
                destination_rank=min(task.peer.regions, default=0),
                start=start,
                end=end,
                num_bytes=0,
                queued_ns=task.queued_ns,
                started_ns=now_ns,
                done_ns=now_ns,
                outcome=PushOutcome.INDETERMINATE if is_unclear else PushOutcome.FAILED_QUIESCED,
                reason=reason,
            )
        )

    def _tell(self, report: PartPushed) -> str:
        try:
            self._emit(report)
        except Exception as error:  # noqa: BLE001 - the rank is ending, or its parent stands still: no reason to end before it
            return f"a report was lost: {reason_of(error, 'reporting a push')}"
        return ""
