"""The faults that a test can plant in the fake data plane do what they are called."""

from __future__ import annotations

import pytest

from common.dataplane.fake import FakeDataPlane, FakeRemoteRegion
from common.dataplane.fake_network import FakeNetwork, FakeRegion, Fault, FaultKind
from common.dataplane.port import Outcome, Quiescence, WriteGrant
from common.layout.run import Run
from common.runtime.clock import SystemClock

NOW = SystemClock().monotonic
GRANT = WriteGrant(lock_cell=0, cells=(0,), generation=1)
RUN = Run(local_offset=0, remote_offset=4, length=4)


class World:
    """A writer and its target."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        owner = FakeDataPlane(self.network, peer_id="owner", incarnation="i1", now=NOW)
        writer = FakeDataPlane(self.network, peer_id="writer", incarnation="i1", now=NOW)
        self.target: FakeRegion = owner.allocate(8, 1)
        self.target.set_generations((0,), 1)
        self.source: FakeRegion = writer.allocate(8, 1)
        self.source.data[:] = b"ABCDEFGH"
        self.remote: FakeRemoteRegion = writer.connect(self.target.descriptor, NOW() + 60)

    def write(self) -> Outcome:
        """One push of four bytes."""
        return self.remote.write([RUN], self.source, GRANT, NOW() + 60).outcome

    def read(self) -> Outcome:
        """The same bytes, pulled."""
        return self.remote.read([RUN], self.source, GRANT, NOW() + 60).outcome


@pytest.fixture
def world() -> World:
    """A fresh pair."""
    return World()


@pytest.mark.parametrize(
    ("kind", "outcome", "landed"),
    [
        (FaultKind.FAIL_BEFORE, Outcome.FAILED_QUIESCED, bytes(8)),
        (FaultKind.FAIL_AFTER, Outcome.FAILED_QUIESCED, b"\0\0\0\0ABCD"),
        (FaultKind.CORRUPT, Outcome.DONE, b"\0\0\0\0\xbeBCD"),
        (FaultKind.INDETERMINATE, Outcome.INDETERMINATE, bytes(8)),
    ],
)
def test_a_fault_hits_one_write(world: World, kind: FaultKind, outcome: Outcome, landed: bytes) -> None:
    """The planted outcome with the planted bytes, once; the next write is sound."""
    world.network.plant(Fault(kind=kind))
    assert (world.write(), bytes(world.target.data)) == (outcome, landed)
    assert (world.write(), bytes(world.target.data)) == (Outcome.DONE, b"\0\0\0\0ABCD")


def test_an_indeterminate_write_lands_late_and_keeps_its_lock(world: World) -> None:
    """Its memory cannot be revoked until it has settled: exactly what quarantine is for."""
    world.network.plant(Fault(kind=FaultKind.INDETERMINATE))
    assert world.write() is Outcome.INDETERMINATE
    assert world.target.revoke((0,), 0, 2, NOW()) is Quiescence.NO
    world.network.settle()
    assert bytes(world.target.data) == b"\0\0\0\0ABCD"
    assert world.target.revoke((0,), 0, 2, NOW()) is Quiescence.YES


def test_an_indeterminate_read_lands_late(world: World) -> None:
    """The reader's own memory is not safe either until it has settled."""
    world.network.plant(Fault(kind=FaultKind.INDETERMINATE))
    assert (world.read(), bytes(world.source.data)) == (Outcome.INDETERMINATE, b"ABCDEFGH")
    world.network.settle()
    assert bytes(world.source.data) == b"\0\0\0\0EFGH"


def test_a_hold_ends_at_the_deadline(world: World) -> None:
    """A held transfer that is never let go fails quiescent at its deadline."""
    fault = Fault(kind=FaultKind.HOLD)
    world.network.plant(fault)
    result = world.remote.write([RUN], world.source, GRANT, NOW() + 0.05)
    assert (result.outcome, fault.entered.is_set(), bytes(world.target.data)) == (
        Outcome.FAILED_QUIESCED,
        True,
        bytes(8),
    )
