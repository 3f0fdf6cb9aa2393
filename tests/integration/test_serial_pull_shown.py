"""What `pdmesh handoff` says of the shards of a pull while they are read: broker and workers over fake engines, in virtual time."""

from __future__ import annotations

import pytest

from common.engine.fake.engine import FakeEngine
from contracts import ids
from contracts.handoff import HandoffState
from contracts.pull import Transfer
from services.decode.service import DecodeService
from services.launcher.core.handoff_view import render_handoff
from tests.integration.whole_mesh import Mesh, run_mesh

HANDOFF = ids.handoff_id(ids.request_id((1).to_bytes(10, "big")), 0)


async def _shards(mesh: Mesh) -> list[str]:
    """The state of each shard, in the words of the command."""
    text = render_handoff(await mesh.broker.show(HANDOFF))
    return [line.partition(": ")[2].partition(",")[0] for line in text.splitlines() if line.split()[0] == "shard"]


@pytest.mark.parametrize(("parallel", "second"), [(True, "pulling"), (False, "waiting")])
def test_every_shard_of_a_pull_is_shown_from_its_begin_on(parallel: bool, second: str) -> None:
    """One by one the second waits as long as the first is read, and is shown meanwhile."""

    async def scenario(mesh: Mesh) -> None:
        (decode,) = (service for service in mesh.services if isinstance(service, DecodeService))
        engine = decode.replicas[0].engine
        assert isinstance(engine, FakeEngine)
        engine.reads.read_s.update({0: 1.0, 1: 1.0})
        await mesh.serve(1, mixed=False, cancel_after=None)
        while (handoff := mesh.broker.handoff(HANDOFF)) is None or handoff.record.lock is None:
            await mesh.clock.sleep(0.01)
        await mesh.clock.sleep(0.5)
        assert await _shards(mesh) == ["pulling", second]
        while mesh.broker.num_in_flight:
            await mesh.clock.sleep(0.01)
        assert await _shards(mesh) == ["done", "done"]
        ended = mesh.broker.handoff(HANDOFF)
        assert ended is not None
        assert ended.state is HandoffState.FINISHED

    run_mesh(scenario, {}, {"transfer": Transfer.PULL, "parallel_shard_pull": parallel}, has_mixed=False)
