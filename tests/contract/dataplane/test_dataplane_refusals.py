"""What every data-plane adapter refuses before a byte of it moves."""

from __future__ import annotations

import msgspec
import pytest

from common.dataplane.port import DataPlaneError, Outcome, WriteGrant
from common.layout.run import Run
from tests.contract.dataplane.bench import GOOD, GRANT, LENGTH, NOW, NUM_CELLS, Bench, soon

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


def test_a_grant_is_looked_at_anew_in_every_write(bench: Bench) -> None:
    """What is known of a grant's cells from the write before does not vouch for the next: one raised cell of many refuses it."""
    cells = tuple(range(5, 55, 2))
    grant = msgspec.structs.replace(GRANT, cells=(*cells, 60))
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
    """A stale, forged or damaged grant writes nothing, reads nothing, and is FAILED_QUIESCED with a reason.

    A grant that could be good, and is not the one in its cells, is told from one that is none.
    """
    grant = msgspec.structs.replace(GRANT, **change)
    before = bytes(bench.source.data)
    for result in (bench.write([GOOD], grant), bench.remote.read([GOOD], bench.source, grant, soon())):
        assert (result.outcome, result.nbytes, bool(result.reason)) == (Outcome.FAILED_QUIESCED, 0, True)
        assert result.is_stale == ("generation" in change or change == {"cells": (1, 3, 60)})
    assert bench.untouched()
    assert bytes(bench.source.data) == before


def test_a_passed_deadline_writes_nothing(bench: Bench) -> None:
    """A transfer whose deadline has passed is refused."""
    result = bench.remote.write([GOOD], bench.source, GRANT, NOW() - 1)
    assert (result.outcome, result.is_stale) == (Outcome.FAILED_QUIESCED, False)
    assert bench.untouched()


WRONG_SECRETS = (b"", b"\xff" + GRANT.secret[1:], GRANT.secret[:-1], bytes(16))


@pytest.mark.parametrize("secret", WRONG_SECRETS, ids=["none", "first byte", "short", "zeros"])
def test_a_wrong_secret_opens_nothing_where_secrets_are_checked(bench: Bench, secret: bytes) -> None:
    """A caller who knows everything but the secret neither writes nor reads; a holder of the memory itself need not show one.

    What is wrong is the grant, as with one that was never given: nothing is held against the connection.
    """
    grant = msgspec.structs.replace(GRANT, secret=secret)
    before = bytes(bench.source.data)
    results = (bench.write([GOOD], grant), bench.remote.read([GOOD], bench.source, grant, soon()))
    if not bench.owner.capabilities.checks_secret:
        assert [result.outcome for result in results] == [Outcome.DONE] * 2
        return
    expected = (Outcome.FAILED_QUIESCED, 0, True)
    assert [(result.outcome, result.nbytes, result.is_stale) for result in results] == [expected] * 2
    assert bench.untouched()
    assert bytes(bench.source.data) == before
    assert bench.write([GOOD]).outcome is Outcome.DONE


def test_a_secret_belongs_to_one_grant(bench: Bench) -> None:
    """The secret of one slot's grant does not open another's, nor does last reservation's open this one's."""
    other = WriteGrant(lock_cell=61, cells=(5, 61), generation=7, secret=bytes(16))
    bench.target.open_grant(other)
    borrowed = msgspec.structs.replace(other, secret=GRANT.secret)
    bench.target.open_grant(msgspec.structs.replace(GRANT, generation=8, secret=bytes(15) + b"x"))
    stale = msgspec.structs.replace(GRANT, generation=8)
    outcomes = [bench.write([GOOD], grant).outcome for grant in (borrowed, stale)]
    expected = Outcome.FAILED_QUIESCED if bench.owner.capabilities.checks_secret else Outcome.DONE
    assert outcomes == [expected] * 2
    assert bench.write([GOOD], other).outcome is Outcome.DONE


def test_a_secret_is_not_shown() -> None:
    """A grant's text, as it stands in errors and logs, has no part of its secret."""
    assert repr(GRANT) == "WriteGrant(lock_cell=60, cells=(1, 2, 60), generation=7)"


@pytest.mark.parametrize(
    "change",
    [
        {"transport": "other"},
        {"version": 99},
        {"incarnation": "i2"},
        {"peer_id": "somebody"},
        {"region_id": "region-99"},
        {"generation": 2**40},
    ],
    ids=str,
)
def test_a_wrong_descriptor_is_refused(bench: Bench, change: dict[str, object]) -> None:
    """Another transport, version, incarnation or region is an error at connect, not a wrong write later.

    The generation is that of the memory: a descriptor of memory that has been replaced under the same id reaches nothing.
    """
    with pytest.raises(DataPlaneError):
        bench.peer.connect(msgspec.structs.replace(bench.target.descriptor, **change), soon())
