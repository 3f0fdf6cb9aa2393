"""A worker whose engine is lost cannot release: that is said as it is, and the handoff ends."""

import structlog

from common.bus.memory import MemoryServer
from contracts.errors import ErrorCode
from tests.integration.broker_world import World, in_world
from tests.integration.handoff_stages import OK, forgotten, prefilling
from tests.integration.scripted_worker import refusing


def test_a_refused_release_is_told_with_the_workers_reason() -> None:
    """The log names the worker's own error, and nothing waits for an answer that will not come."""

    async def scenario(world: World, _: MemoryServer) -> None:
        world.decode.scripts["release"] = refusing(ErrorCode.WORKER_LOST)
        with structlog.testing.capture_logs() as lines:
            await prefilling(world)
            assert await world.cancel() == OK
            await forgotten(world)
        (line,) = [line for line in lines if line["event"] == "release_unheard"]
        assert (line["error_code"], line["worker_id"]) == ("worker_lost", world.decode.ref.worker_id)

    in_world(scenario)
