"""What a rank says of a push, for tests that play the rank."""

from __future__ import annotations

from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome


def part_pushed(handoff_id: str, outcome: PushOutcome, *, rank: int = 0, destination_rank: int = 0) -> PartPushed:
    """A state of layer 0; what failed has a reason that says how."""
    return PartPushed(
        rank=rank,
        seq=1,
        handoff_id=handoff_id,
        namespace=Namespace.TARGET,
        role=Role.SSM,
        layer=0,
        destination_rank=destination_rank,
        start=0,
        end=1,
        num_bytes=0,
        queued_ns=1,
        started_ns=1,
        done_ns=2,
        outcome=outcome,
        reason="" if outcome is PushOutcome.DONE else f"it is {outcome}",
    )
