"""What the bucket could not be told is acknowledged to nobody: whoever leads next would go on with a handoff that is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.bus.errors import BusTimeout
from common.bus.memory import MemoryServer
from contracts.handoff import HandoffState
from contracts.requests import Accepted, Refused
from tests.integration.broker_world import World, in_world
from tests.integration.handoff_stages import OK, committed

Tell = Callable[[World], Awaitable[Accepted | Refused]]

WORDS: dict[str, tuple[Tell, HandoffState, HandoffState]] = {
    "taken over": (World.take_over, HandoffState.COMMITTED, HandoffState.DECODING),
    "ended": (World.end, HandoffState.DECODING, HandoffState.FINISHED),
    "cancelled": (World.cancel, HandoffState.DECODING, HandoffState.CANCELLED),
}


@pytest.mark.parametrize("is_deposed", [False, True])
@pytest.mark.parametrize("word", WORDS)
def test_who_tells_what_cannot_be_written_tells_it_again(word: str, is_deposed: bool) -> None:
    """The store is away for a while: nothing is accepted, and the same word later stands in the record, whoever leads then."""
    tell, before, after = WORDS[word]

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        if before is HandoffState.DECODING:
            assert await world.take_over() == OK
        bus: Any = world.broker_bus
        ask_store = bus.ask_store

        async def unanswered(_subject: str, _act: Any) -> None:
            raise BusTimeout("no answer from the store")

        bus.ask_store = unanswered
        with pytest.raises(BusTimeout):
            await tell(world)
        assert (await world.record()).state is before
        bus.ask_store = ask_store
        if is_deposed:
            await world.stop_broker()
            await world.start_broker(fence=2)
        assert await tell(world) == OK
        assert (await world.record()).state is after

    in_world(scenario, store_timeout_s=1.0)
