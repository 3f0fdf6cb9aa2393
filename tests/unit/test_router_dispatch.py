"""Handing an attempt on, and taking it back: what is repeated, what is waited out, and what is not sent any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.bus.memory import MemoryServer
from common.bus.port import Bus
from common.runtime.clock import Deadline
from common.runtime.tasks import BoundedTasks
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import (
    Accepted,
    CancelRequest,
    CancelWork,
    MixedRoute,
    Refused,
    SamplingParams,
    SubmitRequest,
    WorkerRef,
)
from contracts.subjects import BrokerVerb
from services.router.canceller import Canceller
from services.router.core.prompt_frames import pack_ids, prompt_hash
from services.router.core.remainder import Remainder
from services.router.dispatch import Attempt, Dispatcher, Job, NotTakenError, Submission

PATIENCE_S = 12.0
PACKED = pack_ids([1, 2, 3])
WHOLE = Remainder(packed=PACKED, digest=prompt_hash(PACKED), sampling=SamplingParams(max_tokens=4, seed=1))
JOB = Job(request_id="r1", whole=WHOLE, stops=())
ROUTE = MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="i"))


def attempt(number: int = 0, job: Job = JOB) -> Attempt:
    """One of several at the same job."""
    return Attempt(job=job, remainder=WHOLE, number=number, handoff_id=f"{job.request_id}-{number}", route=ROUTE)


def dispatcher(bus: Bus, clock: VirtualClock) -> Dispatcher:
    """With a second for each call."""
    return Dispatcher(
        bus, clock, router_id="router-0", incarnation="i", call_timeout_s=1.0, outage_patience_s=PATIENCE_S
    )


def in_bus(scenario: Callable[[MemoryServer, VirtualClock], Awaitable[None]]) -> None:
    """Run on the in-memory bus in virtual time."""

    async def main(clock: VirtualClock) -> None:
        await scenario(MemoryServer(clock), clock)

    run_virtual(main)


async def _broker(server: MemoryServer, heard: list[SubmitRequest], *, deaf: int = 0) -> None:
    """Accept whatever is submitted, but for the first `deaf` deliveries."""
    async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.SUBMIT)) as calls:
        async for message in calls:
            heard.append(decode(message.data, SubmitRequest))
            if len(heard) > deaf:
                await message.respond(encode(Accepted(handoff_id=heard[-1].handoff_id)))


def test_each_delivery_names_the_time_that_is_left() -> None:
    """A repeat does not promise time that has passed."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        heard: list[SubmitRequest] = []
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_broker(server, heard, deaf=2))
            await clock.sleep(0.0)
            await dispatcher(server.connect(), clock).submit(attempt(), Deadline.after(clock, 10.0))
            task.cancel()
        assert [round(each.timeout_ms, -2) for each in heard] == [10_000, 9_000, 8_000]
        assert len({(each.handoff_id, each.router_incarnation) for each in heard}) == 1

    in_bus(scenario)


def test_a_submit_that_comes_too_late_is_refused_here() -> None:
    """Nothing is sent: nobody could answer in time."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        deadline = Deadline.after(clock, 0.0004)
        with pytest.raises(PdmeshError) as caught:
            await dispatcher(server.connect(), clock).submit(attempt(), deadline)
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED

    in_bus(scenario)


@pytest.mark.parametrize("outage", ["no broker", "no bus"])
def test_an_outage_is_waited_out(outage: str) -> None:
    """A broker that takes over within its lease, and a server that comes back, take the submit; no attempt is spent."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        heard: list[SubmitRequest] = []
        bus = server.connect()
        async with asyncio.TaskGroup() as group:

            async def recover() -> None:
                await clock.sleep(PATIENCE_S - 1.0)
                if outage == "no bus":
                    server.come_back()
                await _broker(server, heard)

            if outage == "no bus":
                server.go_down()
            task = group.create_task(recover())
            await dispatcher(bus, clock).submit(attempt(), Deadline.after(clock, 60.0))
            task.cancel()
        assert len(heard) == 1

    in_bus(scenario)


@pytest.mark.parametrize("is_heard_once", [False, True])
@pytest.mark.parametrize(
    ("outage", "code"), [("no broker", ErrorCode.WORKER_LOST), ("no bus", ErrorCode.BUS_UNAVAILABLE)]
)
def test_an_outage_is_not_waited_out_for_ever(outage: str, code: ErrorCode, is_heard_once: bool) -> None:
    """It fails the attempt by name once that has taken too long; nothing of it lives anywhere if nobody can have heard of it."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        bus = server.connect()
        heard: list[SubmitRequest] = []

        async def break_down() -> None:
            if is_heard_once:
                task = group.create_task(_broker(server, heard, deaf=1), name="broker")
                while not heard:
                    await clock.sleep(0.01)
                task.cancel()
            if outage == "no bus":
                server.go_down()

        async with asyncio.TaskGroup() as group:
            group.create_task(break_down(), name="break down")
            await clock.sleep(0.0)
            began = clock.monotonic()
            with pytest.raises(PdmeshError) as caught:
                await dispatcher(bus, clock).submit(attempt(), Deadline.after(clock, 60.0))
        assert caught.value.code is code
        assert isinstance(caught.value, NotTakenError) is not is_heard_once
        assert PATIENCE_S <= clock.monotonic() - began < PATIENCE_S + 1.0

    in_bus(scenario)


@pytest.mark.parametrize("before", ["nothing", "nobody was there", "no answer", "a broken connection"])
def test_a_refusal_says_that_nothing_lives_there_only_if_nothing_was_delivered_before(before: str) -> None:
    """A broker that has no room for the repeat may have accepted the first delivery, whose answer was lost."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        async def broker() -> None:
            if before == "nobody was there":
                await clock.sleep(1.0)
            async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.SUBMIT)) as calls:
                first = True
                async for message in calls:
                    if first and before == "no answer":
                        first = False
                    elif first and before == "a broken connection":
                        first = False
                        server.go_down()
                        server.come_back()
                    else:
                        error = ErrorInfo(code=ErrorCode.OVERLOADED, message="full", param="max_tokens")
                        await message.respond(encode(Refused(handoff_id="unknown", error=error)))

        async with asyncio.TaskGroup() as group:
            task = group.create_task(broker())
            await clock.sleep(0.0)
            with pytest.raises(PdmeshError) as caught:
                await dispatcher(server.connect(), clock).submit(attempt(), Deadline.after(clock, 60.0))
            task.cancel()
        refused = caught.value
        assert (refused.code, refused.message, refused.param) == (ErrorCode.OVERLOADED, "full", "max_tokens")
        assert isinstance(refused, NotTakenError) is (before in {"nothing", "nobody was there"})

    in_bus(scenario)


def test_a_worker_that_nobody_hears_of_is_not_waited_for() -> None:
    """It is dead: another attempt goes elsewhere at once."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        began = clock.monotonic()
        with pytest.raises(NotTakenError) as caught:
            await dispatcher(server.connect(), clock).send_prompt(attempt(), Deadline.after(clock, 60.0))
        assert caught.value.code is ErrorCode.WORKER_LOST
        assert clock.monotonic() - began < 0.1

    in_bus(scenario)


def test_a_cancel_that_nobody_hears_is_told_once_a_request() -> None:
    """Its attempts have the same cause; another request is told of on its own."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        log: Any = structlog.get_logger()
        with capture_logs() as lines:
            async with asyncio.TaskGroup() as group:
                canceller = Canceller(
                    server.connect(), clock, log, BoundedTasks(group, name="cancel", limit=8), timeout_s=1.0
                )
                other = Job(request_id="r2", whole=WHOLE, stops=())
                for each in (attempt(0), attempt(1), attempt(2), attempt(0, other)):
                    canceller.cancel(each, Submission.ACCEPTED, Deadline.after(clock, 0.0), reason="test")
        told = [line["request_id"] for line in lines if line["event"] == "cancel_not_heard"]
        assert sorted(told) == ["r1", "r2"]

    in_bus(scenario)


@pytest.mark.parametrize(
    ("submission", "codes", "took_s"),
    [
        (Submission.ACCEPTED, [ErrorCode.UNKNOWN_HANDOFF], (0, 0)),
        (Submission.ACCEPTED, [ErrorCode.OVERLOADED, ErrorCode.OVERLOADED, None], (0.2, 1)),
        (Submission.ACCEPTED, [ErrorCode.INTERNAL], (0, 0)),
        (Submission.MAYBE, [ErrorCode.UNKNOWN_HANDOFF, ErrorCode.UNKNOWN_HANDOFF, None], (0.2, 1)),
        (Submission.MAYBE, [ErrorCode.UNKNOWN_HANDOFF] * 100, (5, 7)),
    ],
    ids=["it is over", "nobody looked at it", "it cannot be done", "it was on its way", "it never came"],
)
def test_a_cancel_is_repeated_until_it_has_been_looked_at(
    submission: Submission, codes: list[ErrorCode | None], took_s: tuple[float, float]
) -> None:
    """A broker that is too busy has heard nothing; one that does not know the handoff may get to know it, but not for ever."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        answers = iter(codes)

        async def broker() -> None:
            async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.CANCEL)) as calls:
                async for message in calls:
                    handoff_id, code = decode(message.data, CancelRequest).handoff_id, next(answers)
                    refused = (
                        None if code is None else Refused(handoff_id=handoff_id, error=ErrorInfo(code=code, message=""))
                    )
                    await message.respond(encode(refused or Accepted(handoff_id=handoff_id)))

        log: Any = structlog.get_logger()
        with capture_logs() as lines:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(broker())
                await clock.sleep(0.0)
                began = clock.monotonic()
                async with asyncio.TaskGroup() as cancels:
                    tasks = BoundedTasks(cancels, name="cancel", limit=8)
                    Canceller(server.connect(), clock, log, tasks, timeout_s=30.0).cancel(
                        attempt(), submission, Deadline.after(clock, 0.0), reason="test"
                    )
                assert took_s[0] <= clock.monotonic() - began <= took_s[1]
                task.cancel()
        assert not lines

    in_bus(scenario)


async def _cancel_broker(server: MemoryServer, heard: list[str]) -> None:
    async with await server.connect().subscribe(subjects.broker_rpc(BrokerVerb.CANCEL)) as calls:
        async for message in calls:
            heard.append(decode(message.data, CancelRequest).handoff_id)
            await message.respond(encode(Accepted(handoff_id=heard[-1])))


async def _hints(server: MemoryServer, times: list[float], clock: VirtualClock) -> None:
    async with await server.connect().subscribe(subjects.cancel("mixed-0", "r1")) as hints:
        async for hint in hints:
            assert decode(hint.data, CancelWork).handoff_id == "r1-0"
            times.append(clock.monotonic())


@pytest.mark.parametrize(
    ("left_s", "leads_after_s", "is_heard"), [(600.0, 90.0, True), (600.0, 595.0, True), (60.0, 90.0, False)]
)
def test_a_cancel_goes_on_until_the_deadline_of_its_request(
    left_s: float, leads_after_s: float, is_heard: bool
) -> None:
    """The hint has stopped the workers, and what they hold waits for a broker that leads; workers need no more hints for that."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        heard: list[str] = []
        hinted: list[float] = []
        log: Any = structlog.get_logger()
        with capture_logs() as lines:
            async with asyncio.TaskGroup() as group:
                hints = group.create_task(_hints(server, hinted, clock))
                await clock.sleep(0.0)
                began = clock.monotonic()
                async with asyncio.TaskGroup() as cancels:
                    canceller = Canceller(
                        server.connect(), clock, log, BoundedTasks(cancels, name="cancel", limit=8), timeout_s=30.0
                    )
                    canceller.cancel(attempt(), Submission.ACCEPTED, Deadline.after(clock, left_s), reason="test")
                    await clock.sleep(leads_after_s)
                    broker = group.create_task(_cancel_broker(server, heard))
                took_s = clock.monotonic() - began
                await clock.sleep(0.0)
                broker.cancel()
                hints.cancel()
        assert heard == (["r1-0"] if is_heard else [])
        assert took_s <= leads_after_s + 5.0
        assert [line["event"] for line in lines] == ([] if is_heard else ["cancel_not_heard"])
        assert hinted[0] == began
        assert 29.0 <= hinted[-1] - began <= 31.0

    in_bus(scenario)


def test_cancels_that_wait_for_long_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many go on behind their first time: the room for those of clients that leave now is not theirs."""
    monkeypatch.setattr("services.router.canceller.MAX_LATE_CANCELS", 3)

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        log: Any = structlog.get_logger()
        with capture_logs() as lines:
            async with asyncio.TaskGroup() as group:
                tasks = BoundedTasks(group, name="cancel", limit=8)
                canceller = Canceller(server.connect(), clock, log, tasks, timeout_s=1.0)
                for number in range(5):
                    each = attempt(0, Job(request_id=f"r{number}", whole=WHOLE, stops=()))
                    canceller.cancel(each, Submission.ACCEPTED, Deadline.after(clock, 600.0), reason="test")
                assert tasks.running == 5
                await clock.sleep(60.0)
                assert tasks.running == 3
                tasks.cancel()
        assert [line["event"] for line in lines] == ["cancel_not_heard"] * 2

    in_bus(scenario)


def test_the_hint_about_what_no_broker_knows_waits_for_the_bus() -> None:
    """The worker that has the prompt learns from nobody else that it is not wanted; once it was told, that is all."""

    async def scenario(server: MemoryServer, clock: VirtualClock) -> None:
        hinted: list[float] = []
        log: Any = structlog.get_logger()
        async with asyncio.TaskGroup() as group:
            hints = group.create_task(_hints(server, hinted, clock))
            await clock.sleep(0.0)
            server.go_down()
            tasks = BoundedTasks(group, name="cancel", limit=8)
            canceller = Canceller(server.connect(), clock, log, tasks, timeout_s=30.0)
            canceller.cancel(attempt(), Submission.NONE, Deadline.after(clock, 600.0), reason="test")
            await clock.sleep(20.0)
            assert not hinted
            server.come_back()
            await clock.sleep(20.0)
            assert (len(hinted), tasks.running) == (1, 0)
            hints.cancel()

    in_bus(scenario)
