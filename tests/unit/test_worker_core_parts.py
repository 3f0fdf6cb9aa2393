"""What prefill's ranks have pushed becomes one cumulative report for each of them."""

from __future__ import annotations

from common.worker.core.parts import PushedParts
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome


def push(rank: int, role: Role, start: int, end: int, *, to: int = 0, began_ns: int = 0) -> PartPushed:
    """A push of 10 bytes a token that took 2 ms."""
    return PartPushed(
        rank=rank,
        seq=1,
        handoff_id="r1-0",
        namespace=Namespace.TARGET,
        role=role,
        layer=3,
        destination_rank=to,
        start=start,
        end=end,
        num_bytes=10 * (end - start),
        queued_ns=0,
        started_ns=began_ns,
        done_ns=began_ns + 2_000_000,
        outcome=PushOutcome.DONE,
    )


def test_pushes_add_up_by_source_rank_and_part() -> None:
    """Touching ranges are joined, times and bytes added, each push raises the revision of its rank alone."""
    parts = PushedParts("r1-0", "i1", 1)
    assert parts.reports() == ()
    parts.add(push(2, Role.KEY, 0, 16, began_ns=5))
    progress = parts.add(push(2, Role.KEY, 16, 40, began_ns=9_000_000))
    assert (progress.num_bytes, progress.push_ms, progress.first_started_ns) == (400, 4.0, 5)
    assert progress.ranges.ranges == ((0, 40),)
    parts.add(push(2, Role.SSM, 0, 1, to=1))
    parts.add(push(0, Role.VALUE, 16, 32))
    key = PartDone(namespace=Namespace.TARGET, role=Role.KEY, layer=3, destination_rank=0, ranges=((0, 40),))
    state = PartDone(namespace=Namespace.TARGET, role=Role.SSM, layer=3, destination_rank=1, ranges=((0, 1),))
    value = PartDone(namespace=Namespace.TARGET, role=Role.VALUE, layer=3, destination_rank=0, ranges=((16, 32),))
    first = PartsReport(
        handoff_id="r1-0",
        incarnation="i1",
        source_dp_rank=1,
        source_rank=0,
        revision=1,
        parts=(value,),
        num_bytes=160,
        push_ms=2.0,
    )
    second = PartsReport(
        handoff_id="r1-0",
        incarnation="i1",
        source_dp_rank=1,
        source_rank=2,
        revision=3,
        parts=(key, state),
        num_bytes=410,
        push_ms=6.0,
    )
    assert parts.reports() == (first, second)
    assert parts.report(2) == second


def test_tokens_that_are_pushed_twice_are_there_once() -> None:
    """Ranges are a set: what overlaps is joined. The work was done twice, and that is told."""
    parts = PushedParts("r1-0", "i1", 0)
    parts.add(push(0, Role.KEY, 0, 16))
    progress = parts.add(push(0, Role.KEY, 8, 24))
    assert (progress.ranges.ranges, progress.num_bytes) == (((0, 24),), 320)
