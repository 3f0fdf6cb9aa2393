"""Deaths and closes on every data-plane adapter: what is in flight is never called delivered."""

from __future__ import annotations

import pytest

from common.dataplane.port import DataPlaneError, Outcome, Quiescence
from tests.contract.dataplane.bench import GOOD, GRANT, PATIENCE_S, Bench, soon


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
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.YES


def test_a_closed_region_does_not_vouch_for_quiescence(bench: Bench) -> None:
    """After close nobody can tell whether writers stopped."""
    bench.target.close()
    bench.target.close()
    assert bench.target.revoke(GRANT.cells, GRANT.lock_cell, 8, soon()) is Quiescence.CANNOT_TELL
