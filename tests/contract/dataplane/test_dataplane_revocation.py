"""Revocation on every data-plane adapter: after YES no write of the grant lands, whatever its writer does."""

from __future__ import annotations

import msgspec
import pytest

from common.dataplane.fake_network import FakeRegion
from common.dataplane.ofd_lock import SharedLocks
from common.dataplane.port import Outcome, Quiescence, TransferResult, WriteGrant
from common.dataplane.tcp_region import Landing, Stoppable, TcpRegion
from contracts.errors import InvalidValueError
from tests.contract.dataplane.bench import GOOD, GRANT, LENGTH, NOW, NUM_CELLS, PATIENCE_S, WHOLE, Bench, Hold, soon


def test_revocation_refuses_later_writes(bench: Bench) -> None:
    """After YES the grant is dead for good, which is told from other failures, and a new grant of the same cells works."""
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.YES
    late = bench.write([GOOD])
    assert (late.outcome, late.is_stale) == (Outcome.FAILED_QUIESCED, True)
    assert bench.untouched()
    assert [bench.target.generation(cell) for cell in (1, 2, 60, 3)] == [8, 8, 8, 0]
    renewed = msgspec.structs.replace(GRANT, generation=9, secret=bytes(16))
    bench.target.open_grant(renewed)
    assert bench.write([GOOD], renewed).outcome is Outcome.DONE


def test_revocation_waits_for_a_writer_in_flight(bench: Bench) -> None:
    """NO while a writer is between its check and its copy, whose result is not DONE then; YES once it has ended, and not before."""
    hold, writing = bench.held_write([GOOD])
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.NO
    revoking = bench.pool.submit(bench.target.revoke, GRANT.cells, GRANT.lock_cell, 8, soon())
    assert not revoking.done()
    hold.gate.set()
    ended = writing.result(PATIENCE_S)
    assert (ended.outcome, ended.is_stale) == (Outcome.FAILED_QUIESCED, True)
    assert revoking.result(PATIENCE_S) is Quiescence.YES


REUSED = bytes([0x99]) * LENGTH


def is_corrupted_by_a_late_write(bench: Bench) -> bool:
    """Revoke while a writer is between its check and its copy, use the memory again as soon as that is allowed, let the writer go on."""
    hold, writing = bench.held_write([WHOLE])
    reused = bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.YES
    if reused:
        bench.target.data[:] = REUSED
    hold.gate.set()
    writing.result(PATIENCE_S)
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.YES
    if not reused:
        bench.target.data[:] = REUSED
    return bytes(bench.target.data) != REUSED


def test_no_late_write_lands_in_memory_that_is_used_again(bench: Bench) -> None:
    """A writer that has passed every check before the revocation cannot touch the memory's next owner."""
    assert not is_corrupted_by_a_late_write(bench)


def test_a_late_write_is_seen_when_writers_are_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with the lock taken out of each adapter, the same writer corrupts the next owner's bytes."""

    def enter_unseen(region: TcpRegion, grant: WriteGrant, connection: Stoppable) -> Landing:
        return Landing(grant, region.check(grant), connection)

    def nothing(*_: object) -> bool:
        return True

    for kind, name in (
        (FakeRegion, "enter"),
        (FakeRegion, "leave"),
        (SharedLocks, "try_acquire"),
        (SharedLocks, "release"),
    ):
        monkeypatch.setattr(kind, name, nothing)
    monkeypatch.setattr(TcpRegion, "enter", enter_unseen)
    assert is_corrupted_by_a_late_write(bench)


def test_revocation_waits_for_every_thread_of_one_writer(bench: Bench) -> None:
    """Two threads of one process write under one grant: the end of the first must not let go of the second's lock."""
    hold, writing = bench.held_write([GOOD])
    assert bench.write([GOOD]).outcome is Outcome.DONE
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, NOW()) is Quiescence.NO
    hold.gate.set()
    assert writing.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.YES


def test_revocation_does_not_wait_for_other_grants(bench: Bench) -> None:
    """A writer in flight under another slot holds nobody up, and is not disturbed."""
    hold, writing = bench.held_write([GOOD])
    bench.target.open_grant(WriteGrant(lock_cell=61, cells=(5, 61), generation=8, secret=bytes(16)))
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
    assert result.is_stale


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
