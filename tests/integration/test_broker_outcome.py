"""A router that missed the broker's last word can ask how its request ended."""

from typing import Any

from common.bus.memory import MemoryServer
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.requests import Accepted, FinishReason, Refused, ReplayAnswer, ReplayTokens, TokenFrame
from contracts.subjects import BrokerVerb, broker_rpc
from tests.integration.broker_world import HANDOFF, World, in_world
from tests.integration.handoff_stages import OK, committed, forgotten, prefilling


async def outcome(world: World, handoff_id: str = HANDOFF) -> Any:
    """What the broker answers."""
    message = ReplayTokens(handoff_id=handoff_id, index=0)
    reply = await world.bus.request(broker_rpc(BrokerVerb.OUTCOME), encode(message))
    return decode(reply.data, ReplayAnswer)  # type: ignore[arg-type]  # a union is not a type


def test_the_end_of_a_request_is_known_for_some_time() -> None:
    """Unknown, under way, and then what the last frame said: the error as it was sent."""

    async def scenario(world: World, _: MemoryServer) -> None:
        unknown = await outcome(world)
        assert isinstance(unknown, Refused)
        assert unknown.error.code is ErrorCode.UNKNOWN_HANDOFF
        await prefilling(world)
        assert await outcome(world) == Accepted(handoff_id=HANDOFF)
        assert await world.cancel("the client left") == OK
        await forgotten(world)
        end = await outcome(world)
        assert isinstance(end, TokenFrame)
        assert end.final
        assert end.error is not None
        assert end.error.code is ErrorCode.CANCELLED

    in_world(scenario)


def test_a_request_that_ended_well_says_how_long_it_is() -> None:
    """Its tokens are with the worker alone; their number and the reason are known here."""

    async def scenario(world: World, _: MemoryServer) -> None:
        await committed(world)
        assert await world.take_over() == OK
        assert await world.end() == OK
        await forgotten(world)
        end = await outcome(world)
        assert (end.token_ids, end.final, end.error) == ((), True, None)
        assert end.finish_reason is FinishReason.LENGTH
        assert end.num_tokens > 0

    in_world(scenario)
