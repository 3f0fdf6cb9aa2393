"""A worker's report is sent until the broker has looked at it."""

from __future__ import annotations

import asyncio

import pytest

from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.broker_client import BrokerClient
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.handoff import RequestEnded
from contracts.requests import Accepted, Refused
from contracts.subjects import BrokerVerb

ENDED = RequestEnded(handoff_id="h", incarnation="i", num_tokens=3)


def refused(code: ErrorCode) -> Refused:
    """An answer that is none, or that says no."""
    return Refused(handoff_id="h", error=ErrorInfo(code=code, message=""))


@pytest.mark.parametrize(
    "last", [Accepted(handoff_id="h"), refused(ErrorCode.UNKNOWN_HANDOFF), refused(ErrorCode.INTERNAL)]
)
def test_who_is_too_busy_is_told_again(last: Accepted | Refused) -> None:
    """A broker that refuses all questions alike has heard nothing; what it says of the report itself counts."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        answers = iter((refused(ErrorCode.OVERLOADED), refused(ErrorCode.OVERLOADED), last))

        async def broker() -> None:
            async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.ENDED)) as calls:
                async for message in calls:
                    await message.respond(encode(next(answers)))

        async with asyncio.TaskGroup() as group:
            task = group.create_task(broker())
            await clock.sleep(0.0)
            client = BrokerClient(server.connect(), clock)
            assert await client.deliver(ENDED, Deadline.after(clock, 10.0)) == last
            task.cancel()

    run_virtual(main)


def test_who_stays_too_busy_is_not_told_for_ever() -> None:
    """Until the deadline, with pauses."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        num_told = 0

        async def broker() -> None:
            nonlocal num_told
            async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.ENDED)) as calls:
                async for message in calls:
                    num_told += 1
                    await message.respond(encode(refused(ErrorCode.OVERLOADED)))

        async with asyncio.TaskGroup() as group:
            task = group.create_task(broker())
            await clock.sleep(0.0)
            with pytest.raises(PdmeshError) as caught:
                await BrokerClient(server.connect(), clock).deliver(ENDED, Deadline.after(clock, 10.0))
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
            task.cancel()
        assert 8 <= num_told <= 20

    run_virtual(main)
