"""What a worker counts of a step is what the step computed, whoever has left since."""

from __future__ import annotations

import pytest

from contracts.requests import Accepted
from tests.integration.worker_world import PROMPT, FaultyEngine, Mesh, in_mesh, pair


def _shown(mesh: Mesh) -> dict[str, float]:
    lines = mesh.services["prefill-0"].metrics.exposition().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("pdmesh_worker_"): float(value) for name, value in pairs if "_total" in name}


@pytest.mark.parametrize("leaving", [["r1-0"], ["r1-0", "r2-0"]], ids=str)
def test_a_prompt_that_is_released_under_way_counts_as_one(leaving: list[str]) -> None:
    """It is no decoding, which a prefill worker never does; and its tokens were computed for nobody, but computed."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        (replica,) = mesh.services["prefill-0"].replicas
        assert isinstance(replica.engine, FaultyEngine)
        replica.engine._step_s = 1.0
        async with replica.loop.lock:
            for handoff in ("r1-0", "r2-0"):
                await mesh.send_prompt("prefill", "prefill-0", handoff)
                assert await mesh.run(await mesh.reserve(handoff=handoff)) == Accepted(handoff_id=handoff)
        await mesh.clock.sleep(0.5)
        assert replica.scheduler.prompts_under_way == {1, 2}
        for handoff in leaving:
            mesh.group.create_task(mesh.release("prefill", "prefill-0", handoff))
        await mesh.clock.sleep(2.0)
        shown = _shown(mesh)
        assert {name: value for name, value in shown.items() if name.startswith("steps_total")} == {
            'steps_total{mode="prefill"}': 1.0,
            'steps_total{mode="chunk"}': 0.0,
        }
        assert (shown["prefilled_tokens_total"], shown["decoded_tokens_total"]) == (2 * len(PROMPT), 0.0)

    in_mesh(scenario)
