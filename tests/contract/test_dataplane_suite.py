"""One suite for every data-plane adapter: what a transfer, a grant and a revocation promise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from common.dataplane import shm_remote
from common.dataplane.copier import copy_group
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork, Fault, FaultKind
from common.dataplane.port import (
    DataPlane,
    DataPlaneError,
    Outcome,
    Quiescence,
    Region,
    RemoteRegion,
    TransferResult,
    WriteGrant,
)
from common.dataplane.shm import ShmDataPlane
from common.layout.joining import pattern_of
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch
from common.runtime.clock import SystemClock
from contracts.errors import InvalidValueError

NOW = SystemClock().monotonic
NUM_CELLS = 64
LENGTH = 1 << 20
POISON = 0xEE
SOURCE = bytes(index * 31 % 251 for index in range(LENGTH))
PATIENCE_S = 60.0
GRANT = WriteGrant(lock_cell=60, cells=(1, 2, 60), generation=7)


class Hold:
    """A transfer that waits in its middle: `entered` is set there, and it goes on when `gate` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()


class Bench:
    """Two processes' ends of one adapter, as far as a test needs them: an owner and two peers."""

    def __init__(self, make: Callable[[str], DataPlane], hold_next: Callable[[Hold], None]) -> None:
        self.make = make
        self.hold_next = hold_next
        self.planes: list[DataPlane] = []
        self.owner = self.plane("owner")
        self.peer = self.plane("peer")
        self.target = self.owner.allocate(LENGTH, NUM_CELLS)
        self.source = self.peer.allocate(LENGTH, NUM_CELLS)
        self.source.data[:] = SOURCE
        self.target.data[:] = bytes([POISON]) * LENGTH
        self.target.set_generations(GRANT.cells, GRANT.generation)
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
        """A push that is in flight when this returns."""
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


def soon() -> float:
    """A deadline that a test never meets unless something hangs."""
    return NOW() + PATIENCE_S


@pytest.fixture(params=["fake", "shm"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Two endpoints of the adapter under test."""
    if request.param == "fake":
        network = FakeNetwork()

        def hold_fake(hold: Hold) -> None:
            network.plant(Fault(kind=FaultKind.HOLD, gate=hold.gate, entered=hold.entered))

        made = Bench(lambda name: FakeDataPlane(network, peer_id=name, incarnation="i1", now=NOW), hold_fake)
    else:

        def hold_shm(hold: Hold) -> None:
            def stop_and_copy(*arguments: object, **named: object) -> int:
                monkeypatch.setattr(shm_remote, "copy_group", copy_group)
                hold.entered.set()
                assert hold.gate.wait(PATIENCE_S)
                return copy_group(*arguments, **named)  # type: ignore[arg-type] # passed on as they came

            monkeypatch.setattr(shm_remote, "copy_group", stop_and_copy)

        made = Bench(lambda name: ShmDataPlane(tmp_path, peer_id=name, incarnation="i1", now=NOW), hold_shm)
    yield made
    made.close()


def expected_after(source: bytes, runs: Sequence[Run], target: bytes) -> bytes:
    """What a correct transfer leaves in the target."""
    result = bytearray(target)
    for run in runs:
        for item in range(run.count):
            start, end = run.local_offset + item * run.local_stride, run.remote_offset + item * run.remote_stride
            result[end : end + run.length] = source[start : start + run.length]
    return bytes(result)


RUN_CASES = {
    "one": [Run(local_offset=0, remote_offset=4096, length=8192)],
    "unaligned": [
        Run(local_offset=3, remote_offset=17, length=1001),
        Run(local_offset=5001, remote_offset=2049, length=1),
    ],
    "zero length": [Run(local_offset=0, remote_offset=0, length=0), Run(local_offset=0, remote_offset=5, length=3)],
    "zero count": [Run(local_offset=0, remote_offset=0, length=8, count=0)],
    "zero length at the end": [Run(local_offset=LENGTH, remote_offset=LENGTH, length=0)],
    "none": [],
    "whole": [Run(local_offset=0, remote_offset=0, length=LENGTH)],
    "strided": [Run(local_offset=7, remote_offset=64, length=100, count=300, local_stride=256, remote_stride=1024)],
    "few strided": [Run(local_offset=7, remote_offset=64, length=100, count=3, local_stride=256, remote_stride=1024)],
    "gathered": [Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=1024, remote_stride=64)],
    "backwards": [Run(local_offset=9000, remote_offset=0, length=10, count=9, local_stride=-1000, remote_stride=10)],
    "touching": [Run(local_offset=1, remote_offset=2, length=10, count=99, local_stride=10, remote_stride=10)],
    "neighbours": [Run(local_offset=100 * i, remote_offset=5 + 100 * i, length=100) for i in range(50)],
    "thousands, regular": [Run(local_offset=200 * i, remote_offset=130 * i, length=100) for i in range(5000)],
    "thousands, irregular": [
        Run(local_offset=(i * 7919) % 900_000, remote_offset=128 * i, length=1 + i % 128) for i in range(5000)
    ],
    "thousands, long pieces": [
        Run(local_offset=(i * 7919) % 900_000, remote_offset=9000 * i, length=8999) for i in range(100)
    ],
    "many of every kind": [
        *(Run(local_offset=64 * i, remote_offset=128 * i, length=64) for i in range(40)),
        *(Run(local_offset=64 * i, remote_offset=8192 + 64 * i, length=64) for i in range(40)),
        Run(local_offset=LENGTH, remote_offset=0, length=0),
        Run(local_offset=9, remote_offset=20_000, length=5, count=100, local_stride=6, remote_stride=7),
        *(
            Run(local_offset=(i * 7919) % 900_000, remote_offset=30_000 + 500 * i, length=100 * (1 + i % 3))
            for i in range(200)
        ),
        *(Run(local_offset=300 * i, remote_offset=200_000 + 300 * i, length=100) for i in range(3)),
        Run(local_offset=5, remote_offset=400_000, length=0, count=9),
    ],
    "regular, then not": [
        *(Run(local_offset=64 * i, remote_offset=128 * i, length=64) for i in range(10)),
        Run(local_offset=0, remote_offset=1280, length=63),
        Run(local_offset=64, remote_offset=1408, length=64),
        Run(local_offset=64, remote_offset=1600, length=64, count=2, local_stride=64, remote_stride=128),
    ],
}


@pytest.mark.parametrize("runs", RUN_CASES.values(), ids=RUN_CASES.keys())
def test_a_write_moves_exactly_the_bytes_of_its_runs(bench: Bench, runs: list[Run]) -> None:
    """Every byte of the runs arrives, no other byte changes, and the result counts them."""
    result = bench.write(runs)
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in runs))
    assert bytes(bench.target.data) == expected_after(bytes(bench.source.data), runs, bytes([POISON]) * LENGTH)


@pytest.mark.parametrize("runs", RUN_CASES.values(), ids=RUN_CASES.keys())
def test_a_read_moves_exactly_the_bytes_of_its_runs(bench: Bench, runs: list[Run]) -> None:
    """The same for a pull: local is the reader's side."""
    bench.source.set_generations(GRANT.cells, GRANT.generation)
    remote = bench.owner.connect(bench.source.descriptor, soon())
    turned = [
        Run(
            local_offset=run.remote_offset,
            remote_offset=run.local_offset,
            length=run.length,
            count=run.count,
            local_stride=run.remote_stride,
            remote_stride=run.local_stride,
        )
        for run in runs
    ]
    result = remote.read(turned, bench.target, GRANT, soon())
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in runs))
    assert bytes(bench.target.data) == expected_after(bytes(bench.source.data), runs, bytes([POISON]) * LENGTH)


GOOD = Run(local_offset=0, remote_offset=0, length=16)
BAD_RUNS = {
    "remote end": Run(local_offset=0, remote_offset=LENGTH - 15, length=16),
    "local end": Run(local_offset=LENGTH - 15, remote_offset=0, length=16),
    "negative remote": Run(local_offset=0, remote_offset=-1, length=16),
    "negative local": Run(local_offset=-1, remote_offset=0, length=16),
    "last of a stride": Run(local_offset=0, remote_offset=0, length=16, count=3, remote_stride=LENGTH // 2 - 7),
    "backwards below 0": Run(local_offset=16, remote_offset=0, length=16, count=3, local_stride=-16),
    "negative length": Run(local_offset=0, remote_offset=0, length=-1),
    "negative count": Run(local_offset=0, remote_offset=0, length=1, count=-1),
    "huge": Run(local_offset=0, remote_offset=2**63, length=16),
}


@pytest.mark.parametrize("bad", BAD_RUNS.values(), ids=BAD_RUNS.keys())
def test_a_run_out_of_bounds_is_refused_before_anything_is_written(bench: Bench, bad: Run) -> None:
    """One bad run refuses the batch, names itself, and the good ones before it leave no trace, on either side."""
    before = bytes(bench.source.data)
    many = [*(msgspec.structs.replace(GOOD, local_offset=start) for start in range(100)), bad, GOOD]
    assert "run 100" in bench.write(many).reason
    result = bench.write([GOOD, bad])
    assert (result.outcome, result.nbytes, "run 1" in result.reason) == (Outcome.FAILED_QUIESCED, 0, True)
    assert bench.remote.read([GOOD, bad], bench.source, GRANT, soon()).outcome is Outcome.FAILED_QUIESCED
    assert bench.untouched()
    assert bytes(bench.source.data) == before


def placed(runs: Sequence[Run], *bases: tuple[int, int]) -> RunBatch:
    """The same pattern at several places, as a pusher sends the layers of a chunk."""
    pattern = pattern_of(runs)
    return RunBatch(Placed(pattern, local, remote) for local, remote in bases)


def scattered_blocks(length: int) -> list[Run]:
    """Blocks in no order on either side."""
    return [
        Run(local_offset=length * (i * 7 % 31), remote_offset=2 * length * (i * 11 % 31), length=length)
        for i in range(31)
    ]


BATCHES = {
    "flat": placed([Run(local_offset=0, remote_offset=0, length=40_000)], (0, 0), (50_000, 100_001)),
    "strided": placed(
        [Run(local_offset=3, remote_offset=0, length=512, count=20, local_stride=512, remote_stride=1024)],
        (0, 0),
        (9, 512),
        (100_000, 500_000),
    ),
    "scattered": placed(scattered_blocks(2048), (0, 0), (4096, 300_000), (17, 600_005)),
    "scattered, odd length": placed(scattered_blocks(701), (0, 0), (5, 300_001)),
    "regular source": placed(
        [Run(local_offset=512 * i, remote_offset=512 * (i * 7 % 31), length=512) for i in range(31)],
        (64, 0),
        (0, 70_000),
    ),
    "nothing": placed([], (0, 0), (2**70, -5)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_moves_exactly_the_bytes_of_its_runs(bench: Bench, batch: RunBatch) -> None:
    """A pattern at several places is the same as all of its runs, one by one: pushed and pulled."""
    result = bench.write(batch)
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in batch))
    written = bytes(bench.target.data)
    assert written == expected_after(bytes(bench.source.data), batch, bytes([POISON]) * LENGTH)
    bench.source.data[:] = bytes(LENGTH)
    assert bench.remote.read(batch, bench.source, GRANT, soon()).outcome is Outcome.DONE
    back = [
        msgspec.structs.replace(
            run,
            local_offset=run.remote_offset,
            remote_offset=run.local_offset,
            local_stride=run.remote_stride,
            remote_stride=run.local_stride,
        )
        for run in batch
    ]
    assert bytes(bench.source.data) == expected_after(written, back, bytes(LENGTH))


@pytest.mark.parametrize(
    "runs", [[GOOD] * 3, scattered_blocks(64), [msgspec.structs.replace(GOOD, count=9, local_stride=16)]]
)
@pytest.mark.parametrize("base", [(-1, 0), (0, -1), (LENGTH - 15, 0), (0, LENGTH - 15), (2**70, 0), (0, -(2**70))])
def test_a_pattern_placed_out_of_bounds_is_refused(bench: Bench, runs: list[Run], base: tuple[int, int]) -> None:
    """One misplaced pattern refuses the whole batch before a byte of it moves, and the reason names a run of it."""
    batch = placed(runs, (0, 0), base, (0, 0))
    before = bytes(bench.source.data)
    for result in (bench.write(batch), bench.remote.read(batch, bench.source, GRANT, soon())):
        assert (result.outcome, result.nbytes, "out of bounds" in result.reason) == (Outcome.FAILED_QUIESCED, 0, True)
    assert bench.untouched()
    assert bytes(bench.source.data) == before


def test_a_grant_is_looked_at_anew_in_every_write(bench: Bench) -> None:
    """What is known of a grant's cells from the write before does not vouch for the next: one raised cell of many refuses it."""
    cells = tuple(range(5, 55, 2))
    grant = WriteGrant(lock_cell=60, cells=(*cells, 60), generation=7)
    bench.target.set_generations(cells, 7)
    others = msgspec.structs.replace(grant, cells=tuple(cell + 1 for cell in grant.cells))
    outside = msgspec.structs.replace(grant, lock_cell=NUM_CELLS)
    assert bench.write([GOOD], grant).outcome is Outcome.DONE
    assert [bench.write([GOOD], bad).outcome for bad in (outside, others)] == [Outcome.FAILED_QUIESCED] * 2
    assert bench.write([GOOD], grant).outcome is Outcome.DONE
    bench.target.set_generations(cells[9:10], 8)
    assert bench.write([GOOD], grant).outcome is Outcome.FAILED_QUIESCED
    assert bench.write([GOOD], msgspec.structs.replace(grant, cells=grant.cells[:9])).outcome is Outcome.DONE


BAD_GRANTS = {
    "old": {"generation": 6},
    "future": {"generation": 8},
    "one cell of another owner": {"cells": (1, 3, 60)},
    "no cells": {"cells": ()},
    "cell out of range": {"cells": (1, NUM_CELLS)},
    "negative cell": {"cells": (-1,)},
    "lock out of range": {"lock_cell": NUM_CELLS},
}


@pytest.mark.parametrize("change", BAD_GRANTS.values(), ids=BAD_GRANTS.keys())
def test_a_grant_that_is_not_current_is_refused(bench: Bench, change: dict[str, object]) -> None:
    """A stale, forged or damaged grant writes nothing, reads nothing, and is FAILED_QUIESCED with a reason."""
    grant = msgspec.structs.replace(GRANT, **change)
    before = bytes(bench.source.data)
    for result in (bench.write([GOOD], grant), bench.remote.read([GOOD], bench.source, grant, soon())):
        assert (result.outcome, result.nbytes, bool(result.reason)) == (Outcome.FAILED_QUIESCED, 0, True)
    assert bench.untouched()
    assert bytes(bench.source.data) == before


def test_a_passed_deadline_writes_nothing(bench: Bench) -> None:
    """A transfer whose deadline has passed is refused."""
    result = bench.remote.write([GOOD], bench.source, GRANT, NOW() - 1)
    assert result.outcome is Outcome.FAILED_QUIESCED
    assert bench.untouched()


def test_revocation_refuses_later_writes(bench: Bench) -> None:
    """After YES the grant is dead for good, and a new grant of the same cells works."""
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.YES
    assert bench.write([GOOD]).outcome is Outcome.FAILED_QUIESCED
    assert bench.untouched()
    assert [bench.target.generation(cell) for cell in (1, 2, 60, 3)] == [8, 8, 8, 0]
    bench.target.set_generations(GRANT.cells, 9)
    assert bench.write([GOOD], msgspec.structs.replace(GRANT, generation=9)).outcome is Outcome.DONE


def test_revocation_waits_for_a_writer_in_flight(bench: Bench) -> None:
    """NO while a writer is in its copy; that writer's result is not DONE; YES once it has ended, and nothing lands after that."""
    hold, writing = bench.held_write([GOOD])
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.NO
    revoking = bench.pool.submit(bench.target.revoke, GRANT.cells, GRANT.lock_cell, 8, soon())
    assert not revoking.done()
    hold.gate.set()
    assert writing.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    assert revoking.result(PATIENCE_S) is Quiescence.YES


def test_revocation_waits_for_every_thread_of_one_writer(bench: Bench) -> None:
    """Two threads of one process write under one grant: the end of the first must not let go of the second's lock."""
    hold, writing = bench.held_write([GOOD])
    assert bench.write([GOOD]).outcome is Outcome.DONE
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.NO
    hold.gate.set()
    assert writing.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.YES


def test_revocation_does_not_wait_for_other_grants(bench: Bench) -> None:
    """A writer in flight under another slot holds nobody up, and is not disturbed."""
    hold, writing = bench.held_write([GOOD])
    bench.target.set_generations((5, 61), 8)
    assert bench.target.revoke((5, 61), 61, 9, NOW()) is Quiescence.YES
    hold.gate.set()
    assert writing.result(PATIENCE_S) == TransferResult(outcome=Outcome.DONE, nbytes=16)


def test_a_read_that_was_overtaken_does_not_count(bench: Bench) -> None:
    """The owner ends the lease while a reader copies: the reader's bytes may be another request's, so the read fails."""
    hold = Hold()
    bench.hold_next(hold)
    reading = bench.pool.submit(bench.remote.read, [GOOD], bench.source, GRANT, soon())
    assert hold.entered.wait(PATIENCE_S)
    bench.target.set_generations(GRANT.cells, 8)
    hold.gate.set()
    result = reading.result(PATIENCE_S)
    assert (result.outcome, "generation" in result.reason) == (Outcome.FAILED_QUIESCED, True)


def test_generations_only_rise(bench: Bench) -> None:
    """A late repetition of an old reserve or release cannot bring a dead grant back; the error names the cell."""
    for call in (
        lambda: bench.target.set_generations((1, 2), 6),
        lambda: bench.target.revoke((3, 1), 60, 6, soon()),
    ):
        with pytest.raises(InvalidValueError, match="cell 1 holds 7"):
            call()
    assert [bench.target.generation(cell) for cell in (1, 2, 3)] == [7, 7, 0]


@pytest.mark.parametrize(("cells", "value"), [((NUM_CELLS,), 9), ((-1,), 9), ((1,), 0), ((1,), 2**64)])
def test_bad_cells_and_values_are_refused(bench: Bench, cells: tuple[int, ...], value: int) -> None:
    """A cell outside the header or a value that no cell can hold is an error, and nothing changes."""
    with pytest.raises(InvalidValueError):
        bench.target.set_generations(cells, value)
    assert bench.target.generation(1) == 7


def test_two_sources_fill_one_destination(bench: Bench) -> None:
    """Two ranks push interleaved shards at the same time under one grant: every byte is in place."""
    second = bench.plane("second")
    other = second.allocate(LENGTH, NUM_CELLS)
    other.data[:] = bytes([0x22]) * LENGTH
    bench.source.data[:] = bytes([0x11]) * LENGTH
    remote = second.connect(bench.target.descriptor, soon())
    piece, count = 512, LENGTH // 1024
    first_runs = [
        Run(local_offset=0, remote_offset=0, length=piece, count=count, local_stride=piece, remote_stride=2 * piece)
    ]
    second_runs = [Run(local_offset=piece * i, remote_offset=piece + 2 * piece * i, length=piece) for i in range(count)]
    futures = [
        bench.pool.submit(bench.remote.write, first_runs, bench.source, GRANT, soon()),
        bench.pool.submit(remote.write, second_runs, other, GRANT, soon()),
    ]
    assert [future.result(PATIENCE_S).outcome for future in futures] == [Outcome.DONE] * 2
    assert bytes(bench.target.data) == (b"\x11" * piece + b"\x22" * piece) * count


def test_a_peers_death_is_seen_and_refuses_transfers(bench: Bench) -> None:
    """When the owner is gone, `peer_alive` is False, transfers are FAILED_QUIESCED and connecting fails."""
    assert bench.remote.peer_alive
    descriptor = bench.target.descriptor
    bench.owner.close()
    result = bench.write([GOOD])
    assert (result.outcome, bench.remote.peer_alive) == (Outcome.FAILED_QUIESCED, False)
    with pytest.raises(DataPlaneError):
        bench.peer.connect(descriptor, soon())


def test_a_death_in_mid_write_is_not_done(bench: Bench) -> None:
    """The owner closes the region while a write is in flight: the writer must not report it as delivered."""
    hold, writing = bench.held_write([GOOD])
    bench.target.close()
    hold.gate.set()
    assert writing.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED


def test_closing_the_writers_end_in_mid_write_is_safe(bench: Bench) -> None:
    """Another thread closes the remote region: the transfer in flight ends by itself, later ones are refused."""
    hold, writing = bench.held_write([GOOD])
    bench.remote.close()
    bench.remote.close()
    hold.gate.set()
    assert writing.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    assert bench.write([GOOD]).outcome is Outcome.FAILED_QUIESCED
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.YES


def test_a_closed_region_does_not_vouch_for_quiescence(bench: Bench) -> None:
    """After close nobody can tell whether writers stopped."""
    bench.target.close()
    bench.target.close()
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.CANNOT_TELL


@pytest.mark.parametrize(
    "change", [{"transport": "other"}, {"version": 99}, {"incarnation": "i2"}, {"region_id": "region-99"}], ids=str
)
def test_a_wrong_descriptor_is_refused(bench: Bench, change: dict[str, object]) -> None:
    """Another transport, version, incarnation or region is an error at connect, not a wrong write later."""
    with pytest.raises(DataPlaneError):
        bench.peer.connect(msgspec.structs.replace(bench.target.descriptor, **change), soon())


def test_allocation_checks_its_sizes(bench: Bench) -> None:
    """An empty region or one without cells is refused by name, and a closed data plane allocates nothing."""
    with pytest.raises(InvalidValueError, match="nbytes"):
        bench.owner.allocate(0, 1)
    with pytest.raises(InvalidValueError, match="num_cells"):
        bench.owner.allocate(1, 0)
    bench.owner.close()
    with pytest.raises(DataPlaneError):
        bench.owner.allocate(1, 1)


def test_a_new_region_is_zero_and_its_own(bench: Bench) -> None:
    """Regions of one endpoint have different ids and memory; data and cells begin as zeros."""
    first, second = bench.owner.allocate(100, 3), bench.owner.allocate(100, 3)
    assert first.descriptor.region_id != second.descriptor.region_id
    first.data[0] = 1
    assert (bytes(second.data), [second.generation(cell) for cell in range(3)]) == (bytes(100), [0, 0, 0])
    assert (first.descriptor.length, first.descriptor.num_cells) == (100, 3)


def test_a_foreign_region_is_not_local(bench: Bench) -> None:
    """A local region of another adapter is a programming error, said by name."""
    other = (
        FakeDataPlane(FakeNetwork(), peer_id="x", incarnation="i1", now=NOW)
        if isinstance(bench.owner, ShmDataPlane)
        else None
    )
    foreign: object = other.allocate(16, 1) if other is not None else object()
    with pytest.raises(InvalidValueError, match="local"):
        bench.remote.write([GOOD], foreign, GRANT, soon())  # type: ignore[arg-type] # that is the point


def check_ports(plane: DataPlane, region: Region, remote: RemoteRegion) -> tuple[bool, bool, bool]:
    """Typed as the ports, so that the checker compares the adapters with them."""
    capabilities = plane.capabilities
    return capabilities.revocable, region.descriptor == remote.descriptor, capabilities.max_batch >= 1024


def test_adapters_satisfy_the_ports(bench: Bench) -> None:
    """Both adapters check generations themselves and describe the same region on both sides."""
    assert check_ports(bench.owner, bench.target, bench.remote) == (True, True, True)
