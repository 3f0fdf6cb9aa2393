"""What a fake engine says of its pushes: nothing moves, and all of it arrives."""

from __future__ import annotations

from contracts.manifest import Namespace, PlannedPart, Role
from contracts.rank import BindSequence, PartPushed, PushOutcome


def unsent(binding: BindSequence, start: int, end: int, started_ns: int, ended_ns: int) -> PartPushed:
    """A push that failed, and of which nothing moves any more: tokens `[start, end)` of a sequence."""
    return PartPushed(
        rank=0,
        seq=binding.seq,
        handoff_id=binding.handoff_id,
        namespace=Namespace.TARGET,
        role=Role.KEY,
        layer=0,
        destination_rank=0,
        start=start,
        end=end,
        num_bytes=0,
        queued_ns=started_ns,
        started_ns=started_ns,
        done_ns=ended_ns,
        outcome=PushOutcome.FAILED_QUIESCED,
        reason="the peer is not linked any more",
    )


def pushed_part(  # noqa: PLR0917 - a part, whose it is, its range, and when
    part: PlannedPart, binding: BindSequence, start: int, end: int, started_ns: int, ended_ns: int
) -> PartPushed:
    """A push that is done: units `[start, end)` of a part."""
    return PartPushed(
        rank=part.src_rank,
        seq=binding.seq,
        handoff_id=binding.handoff_id,
        namespace=part.namespace,
        role=part.role,
        layer=part.layer,
        destination_rank=part.dst_rank,
        start=start,
        end=end,
        num_bytes=0,
        queued_ns=started_ns,
        started_ns=started_ns,
        done_ns=ended_ns,
        outcome=PushOutcome.DONE,
    )
