"""`pdmesh handoff ID` asks the broker, and says what it knows."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from common.bus.memory import MemoryServer
from common.bus.port import bucket_ttl_s
from common.bus.storage import LEASE_TTL_S
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.handoff import PullHandoff, RunPrefill
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.requests import Accepted
from services.launcher.arguments import parse
from services.launcher.console import Console
from services.launcher.show_handoff import show_handoff
from tests.integration.broker_world import HANDOFF, World, in_world

Show = Callable[[str], Coroutine[Any, Any, tuple[int, str, str]]]


def shower(world: World) -> Show:
    """Runs the command; returns its status, its output and what it said beside."""

    async def show(name: str) -> tuple[int, str, str]:
        out, progress = io.StringIO(), io.StringIO()
        status = await show_handoff(world.bus, name, Console(world.clock, out=out, progress=progress))
        return status, out.getvalue(), progress.getvalue()

    return show


def test_who_owns_what_while_decode_pulls() -> None:
    """Grant, source, lock and what is missing; the name may be a handoff's, a request's or a completion's."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        show = shower(world)
        world.pulls(Role.CONV, Role.SSM)
        assert await world.submit() == Accepted(handoff_id=HANDOFF)
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        await world.finish_prefill()
        await world.until(lambda: bool(world.decode.of(PullHandoff)))
        await world.publish_parts(world.reports(transfer=Transfer.PULL)[0])
        status, text, said = await show(HANDOFF)
        assert (status, said) == (0, "")
        for line in (
            "handoff r1-0: prefilling",
            "  route      prefill-0 (ip) -> decode-0 (id)",
            "  grant      decode-0: generation 7, 4 blocks (1-4), slot 2",
            "  source     prefill-0: generation 3, 3 blocks (5-7), slot 1",
            "  pulls      conv, ssm",
            "  memory     may be held by: decode, prefill",
            "  pull       source rank 1: 0 of 2 parts, 0 bytes",
            "  2 of 8 parts have not arrived in full:",
            "    target ssm of layer 0, source rank 1 -> destination rank 0 (pull): nothing of [0, 1)",
        ):
            assert line in text.splitlines(), text
        assert "  lock       1, held by decode-0 (id) since " in text
        assert "abab" not in text
        for name in ("r1", "cmpl-r1", "chatcmpl-r1"):
            assert (await show(name))[1] == text

    in_world(scenario)


def test_every_attempt_of_a_request_is_shown() -> None:
    """One after the other, with how the earlier one ended."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        show = shower(world)
        await world.submit()
        await world.submit(handoff_id="r1-1", attempt=1)
        await world.until(lambda: world.broker.num_in_flight == 1)
        status, text, _ = await show("r1")
        assert status == 0
        first, second = text.split("\n\n")
        assert first.startswith("handoff r1-0: cancelled: cancelled: r1-1 has taken its place")
        assert second.startswith("handoff r1-1: ")
        assert "  memory     given back everywhere" in first.splitlines()

    in_world(scenario)


def test_an_attempt_that_another_one_follows_ends_with_its_error() -> None:
    """The router knows why it tries again: the one before has not been cancelled, it failed."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.submit()
        gave_way = ErrorInfo(code=ErrorCode.PREEMPTED, message="it gave way")
        await world.submit(handoff_id="r1-1", attempt=1, previous_error=gave_way)
        await world.until(lambda: world.broker.num_in_flight == 1)
        _, text, _ = await shower(world)("r1-0")
        assert text.startswith("handoff r1-0: failed: preempted: it gave way")

    in_world(scenario)


def test_what_nobody_knows_is_said() -> None:
    """Status 1, and where else to look; no broker at all is another answer; what is no id is a mistake of the caller."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        show = shower(world)
        status, text, said = await show("nothing")
        assert (status, text) == (1, "")
        assert "knows nothing of nothing" in said
        await world.stop_broker()
        begun = world.clock.monotonic()
        status, _, said = await show("nothing")
        assert status == 1
        assert "another one may be taking over: asking again for 20 s" in said
        assert said.endswith("no broker answered within 20 s (worker_lost): none leads\n")
        assert world.clock.monotonic() - begun >= 20
        with pytest.raises(InvalidValueError):
            await show("No Id")

    in_world(scenario)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_broker_that_takes_over_is_waited_for(replicas: int) -> None:
    """Whoever asks in between is told so, and then gets the answer: on a NATS cluster, too, where a lease lasts longer."""
    takeover_s = 1.1 * bucket_ttl_s(LEASE_TTL_S, replicas)

    async def scenario(world: World, _server: MemoryServer) -> None:
        show = shower(world)
        await world.submit()
        await world.stop_broker()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(show("r1"), name="asking")
            await world.clock.sleep(takeover_s)
            await world.start_broker()
        status, text, said = asking.result()
        assert status == 0
        assert text.startswith("handoff r1-0: ")
        assert "another one may be taking over" in said

    in_world(scenario)


def test_the_command_is_known() -> None:
    """With its own server, as every command that looks into a mesh."""
    arguments = parse(["handoff", "cmpl-r1", "--nats", "nats://127.0.0.1:1"])
    assert (arguments.command, arguments.name, arguments.nats) == ("handoff", "cmpl-r1", "nats://127.0.0.1:1")
