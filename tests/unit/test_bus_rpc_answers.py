"""What an answer of a service says of the message that it answers."""

import asyncio
from typing import Any

import pytest
import structlog

from common.bus import rpc
from common.bus.memory import MemoryServer
from common.bus.rpc import RpcEdge, was_not_looked_at
from common.runtime.clock import SystemClock
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.requests import Accepted, Refused


@pytest.mark.parametrize("code", list(ErrorCode))
def test_only_want_of_room_means_that_nobody_has_looked(code: ErrorCode) -> None:
    """Whatever else a service says, it has read the message."""
    refused = Refused(handoff_id="h-0", error=ErrorInfo(code=code, message=""))
    assert was_not_looked_at(refused) is (code is ErrorCode.OVERLOADED)


@pytest.mark.parametrize("answer", [None, Accepted(handoff_id="h-0")])
def test_what_is_no_refusal_was_looked_at(answer: Accepted | None) -> None:
    """An acceptance, and what an asker has taken for no answer already."""
    assert not was_not_looked_at(answer)


async def test_the_edge_of_a_full_service_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says to the asker what the asker takes for it."""
    monkeypatch.setattr(rpc, "MAX_HANDLERS", 1)
    server = MemoryServer(SystemClock())
    log: Any = structlog.get_logger()
    entered = asyncio.Event()

    async def busy(_: bytes) -> Accepted:
        entered.set()
        await asyncio.Event().wait()
        return Accepted(handoff_id="h-0")

    async with asyncio.TaskGroup() as group, asyncio.timeout(20.0):
        edge = RpcEdge(server.connect(), group, log)
        reading = group.create_task((await edge.serve("pd.v1.rpc.broker.>", {"cancel": busy}))(), name="reading")
        bus = server.connect()
        first = group.create_task(bus.request("pd.v1.rpc.broker.cancel", b"", timeout=60.0), name="first")
        await entered.wait()
        reply = await bus.request("pd.v1.rpc.broker.cancel", b"", timeout=20.0)
        assert was_not_looked_at(decode(reply.data, Accepted | Refused))  # type: ignore[arg-type]  # a union is not a type
        first.cancel()
        reading.cancel()
        edge._tasks.cancel()
