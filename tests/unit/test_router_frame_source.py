"""Asking for frames that do not come: never for ever at the same pace, and not only in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import Accepted, FinishReason, MixedRoute, ReplayTokens, SamplingParams, TokenFrame, WorkerRef
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from services.router.core.mesh_view import MeshView
from services.router.core.patience import LONGEST_S
from services.router.core.prompt_frames import pack_ids, prompt_hash
from services.router.core.remainder import Remainder
from services.router.core.token_order import MAX_WAITING_FRAMES, TokenOrder
from services.router.dispatch import Attempt, Job
from services.router.metrics import RouterMetrics
from services.router.replaying import FrameSource, Replayer
from services.router.token_inbox import Mailbox

Reply = Callable[[ReplayTokens], TokenFrame | Accepted | None]

PACKED = pack_ids([1, 2, 3])
WHOLE = Remainder(packed=PACKED, digest=prompt_hash(PACKED), sampling=SamplingParams(max_tokens=4, seed=1))
ATTEMPT = Attempt(
    job=Job(request_id="r", whole=WHOLE, stops=()),
    remainder=WHOLE,
    number=0,
    handoff_id="r-0",
    route=MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="i")),
)
WORKER = subjects.worker_rpc(WorkerRole.MIXED, "mixed-0", WorkerVerb.REPLAY)
BROKER = subjects.broker_rpc(BrokerVerb.OUTCOME)
UNDER_WAY = Accepted(handoff_id="r-0")


def frame(index: int, *token_ids: int, **fields: Any) -> TokenFrame:
    """A frame of the attempt."""
    return TokenFrame(handoff_id="r-0", request_id="r", attempt=0, index=index, token_ids=token_ids, **fields)


STOPPED_BEHIND = frame(9, final=True, num_tokens=9, finish_reason=FinishReason.STOP)
FAILED = frame(0, final=True, error=ErrorInfo(code=ErrorCode.INTERNAL, message="m"))


class Wanting:
    """A source whose questions a worker and a broker answer, and how often the worker was asked."""

    def __init__(self, source: FrameSource, order: TokenOrder, mailbox: Mailbox) -> None:
        self.order = order
        self.mailbox = mailbox
        self.num_asked = 0
        self._source = source

    async def until_end(self) -> None:
        """Take frames until the attempt has ended."""
        while self.order.end is None:
            self.order.accept(await self._source.next())


def wanting(
    worker: Reply, broker: Reply, scenario: Callable[[Wanting, VirtualClock], Awaitable[None]], *, start: int = 1
) -> None:
    """Run in virtual time, with the first `start` tokens there."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        mailbox = Mailbox(limit=1024, overflowed=lambda error: pytest.fail(error.message))
        mailbox.begin(0)
        order = TokenOrder(attempt=0)
        order.accept(frame(0, *range(start)))

        async def answer(subject: str, reply: Reply, told: Wanting | None) -> None:
            async with await server.connect().subscribe(subject) as calls:
                async for message in calls:
                    if told is not None:
                        told.num_asked += 1
                    said = reply(decode(message.data, ReplayTokens))
                    if said is not None:
                        await message.respond(encode(said))

        async with asyncio.TaskGroup() as group:
            replayer = Replayer(
                server.connect(),
                RouterMetrics(Metrics()),
                BoundedTasks(group, name="acknowledge", limit=8),
                view=MeshView,
            )
            world = Wanting(FrameSource(replayer, ATTEMPT, mailbox, order), order, mailbox)
            tasks = [
                group.create_task(answer(WORKER, worker, world), name="worker"),
                group.create_task(answer(BROKER, broker, None), name="broker"),
            ]
            await clock.sleep(0.0)
            await scenario(world, clock)
            for task in tasks:
                task.cancel()

    run_virtual(main)


UNFIT = {
    "an end that cannot be reached": STOPPED_BEHIND,
    "tokens behind the one that is missing": frame(5, 7, 8),
    "tokens that have come": frame(0, 0),
    "another attempt": TokenFrame(handoff_id="r-1", request_id="r", attempt=1, index=1, token_ids=(5,)),
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_a_worker_that_says_the_same_for_ever_is_asked_less_and_less_often(unfit: TokenFrame) -> None:
    """While the broker says that the attempt is under way it may still end well, so it is waited for."""

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        with pytest.raises(TimeoutError):
            async with Deadline.after(clock, 60 * LONGEST_S).timeout():
                await world.until_end()
        assert 60 <= world.num_asked <= 75

    wanting(lambda _: unfit, lambda _: UNDER_WAY, scenario)


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_what_no_worker_can_tell_of_an_attempt_that_has_ended_is_lost(unfit: TokenFrame) -> None:
    """To say something else is not to know: the attempt fails by name and another one goes on, long before the deadline."""

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        async with Deadline.after(clock, 60.0).timeout():
            with pytest.raises(PdmeshError, match="tokens from 1 on are lost") as lost:
                await world.until_end()
        assert lost.value.code is ErrorCode.WORKER_LOST

    wanting(lambda _: unfit, lambda _: STOPPED_BEHIND, scenario)


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_the_broker_is_asked_whatever_a_worker_says_that_does_not_help(unfit: TokenFrame) -> None:
    """It knows that the attempt failed."""

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        async with Deadline.after(clock, 60.0).timeout():
            await world.until_end()
        assert world.order.end is not None
        assert world.order.end.error == FAILED.error

    wanting(lambda _: unfit, lambda _: FAILED, scenario)


def test_ends_that_contradict_each_other_are_no_loop() -> None:
    """The worker's counts three tokens, the broker's one."""

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        world.mailbox.put(STOPPED_BEHIND)
        async with Deadline.after(clock, 60.0).timeout():
            with pytest.raises(PdmeshError, match="are lost"):
                await world.until_end()

    one = frame(1, final=True, num_tokens=1, finish_reason=FinishReason.LENGTH)
    wanting(lambda _: STOPPED_BEHIND, lambda _: one, scenario)


def test_a_stream_that_goes_on_behind_a_loss_is_asked_about() -> None:
    """Frames come faster than a gap is waited for, so there is never silence; more of them than may wait would end the request."""
    num_tokens = 2 * MAX_WAITING_FRAMES

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        async def stream() -> None:
            for index in range(2, num_tokens):
                await clock.sleep(0.01)
                world.mailbox.put(frame(index, index))
            world.mailbox.put(frame(num_tokens, final=True, num_tokens=num_tokens, finish_reason=FinishReason.STOP))

        async with asyncio.TaskGroup() as group:
            group.create_task(stream(), name="stream")
            await world.until_end()
        assert world.order.next_index == num_tokens
        assert world.num_asked == 1

    wanting(lambda asked: frame(asked.index, asked.index), lambda _: UNDER_WAY, scenario)


def test_a_gap_that_opens_after_a_long_wait_is_asked_about_soon() -> None:
    """The questions before were about silence, of which there is none any more."""

    async def scenario(world: Wanting, clock: VirtualClock) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(world.until_end(), name="reader")
            await clock.sleep(20 * LONGEST_S)
            before = world.num_asked
            world.mailbox.put(frame(2, 2))
            await clock.sleep(0.5)
            assert world.num_asked > before
            task.cancel()

    wanting(lambda asked: frame(asked.index), lambda _: UNDER_WAY, scenario)
