"""Two ends of one data-plane adapter in this process, and a way to stop a transfer in its middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from common.dataplane import shm_remote, tcp_transfer
from common.dataplane.copier import copy_group
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork, Fault, FaultKind
from common.dataplane.port import DataPlane, TransferResult, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_caller import Caller
from common.dataplane.tcp_vector import Vector
from common.layout.run import Run
from common.runtime.clock import SystemClock

NOW = SystemClock().monotonic
NUM_CELLS = 64
LENGTH = 1 << 20
POISON = 0xEE
SOURCE = bytes(index * 31 % 251 for index in range(LENGTH))
PATIENCE_S = 60.0
SECRET = bytes(range(16))
GRANT = WriteGrant(lock_cell=60, cells=(1, 2, 60), generation=7, secret=SECRET)
GOOD = Run(local_offset=0, remote_offset=0, length=16)
WHOLE = Run(local_offset=0, remote_offset=0, length=LENGTH)
ADAPTERS = ("fake", "shm", "tcp")


def soon() -> float:
    """A deadline that a test never meets unless something hangs."""
    return NOW() + PATIENCE_S


class Hold:
    """A transfer that waits in its middle: `entered` is set there, and it goes on when `gate` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()

    def wait(self) -> None:
        """What the transfer does in its middle."""
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)


class Bench:
    """Two processes' ends of one adapter, as far as a test needs them: an owner and two peers."""

    def __init__(self, adapter: str, make: Callable[[str], DataPlane], hold_next: Callable[[Hold], None]) -> None:
        self.adapter = adapter
        self.make = make
        self.hold_next = hold_next
        self.planes: list[DataPlane] = []
        self.owner = self.plane("owner")
        self.peer = self.plane("peer")
        self.target = self.owner.allocate(LENGTH, NUM_CELLS)
        self.source = self.peer.allocate(LENGTH, NUM_CELLS)
        self.source.data[:] = SOURCE
        self.target.data[:] = bytes([POISON]) * LENGTH
        self.target.open_grant(GRANT)
        self.remote = self.peer.connect(self.target.descriptor, soon())
        self.pool = ThreadPoolExecutor(4)

    def plane(self, peer_id: str) -> DataPlane:
        """One more endpoint."""
        self.planes.append(self.make(peer_id))
        return self.planes[-1]

    def write(self, runs: Sequence[Run], grant: WriteGrant = GRANT) -> TransferResult:
        """Push from the peer into the owner's region."""
        return self.remote.write(runs, self.source, grant, soon())

    def held_write(self, runs: Sequence[Run], deadline: float | None = None) -> tuple[Hold, Future[TransferResult]]:
        """A push that is in flight when this returns: its grant has been checked, and no byte has been copied yet."""
        hold = Hold()
        self.hold_next(hold)
        future = self.pool.submit(self.remote.write, runs, self.source, GRANT, deadline or soon())
        assert hold.entered.wait(PATIENCE_S)
        return hold, future

    def untouched(self) -> bool:
        """Whether nothing at all was written into the owner's region."""
        return bytes(self.target.data) == bytes([POISON]) * LENGTH

    def close(self) -> None:
        """End everything."""
        self.pool.shutdown()
        for plane in self.planes:
            plane.close()


def make_bench(adapter: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench for the adapter of that name."""
    match adapter:
        case "fake":
            network = FakeNetwork()

            def hold_fake(hold: Hold) -> None:
                network.plant(Fault(kind=FaultKind.HOLD, gate=hold.gate, entered=hold.entered))

            return Bench(
                adapter, lambda name: FakeDataPlane(network, peer_id=name, incarnation="i1", now=NOW), hold_fake
            )
        case "shm":

            def hold_shm(hold: Hold) -> None:
                def stop_and_copy(*arguments: object, **named: object) -> int:
                    monkeypatch.setattr(shm_remote, "copy_group", copy_group)
                    hold.wait()
                    return copy_group(*arguments, **named)  # type: ignore[arg-type] # passed on as they came

                monkeypatch.setattr(shm_remote, "copy_group", stop_and_copy)

            return Bench(
                adapter, lambda name: ShmDataPlane(directory, peer_id=name, incarnation="i1", now=NOW), hold_shm
            )
        case _:
            land, lend = Caller.land, Caller.lend

            def hold_tcp(hold: Hold) -> None:
                def restore() -> None:
                    monkeypatch.setattr(Caller, "land", land)
                    monkeypatch.setattr(Caller, "lend", lend)

                def stop_and_land(caller: Caller, pieces: Vector, deadline: float) -> None:
                    restore()
                    hold.wait()
                    land(caller, pieces, deadline)

                def stop_and_lend(caller: Caller, pieces: Vector, deadline: float) -> None:
                    restore()
                    hold.wait()
                    lend(caller, pieces, deadline)

                monkeypatch.setattr(Caller, "land", stop_and_land)
                monkeypatch.setattr(Caller, "lend", stop_and_lend)

            # A writer that gives up waits until the owner has said what it did: never a matter of luck in a test.
            monkeypatch.setattr(tcp_transfer, "SETTLE_S", PATIENCE_S)
            return Bench(
                adapter, lambda name: TcpDataPlane("127.0.0.1", peer_id=name, incarnation="i1", now=NOW), hold_tcp
            )
