"""What every bus adapter owes its users, 1: messages, requests and their limits."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.bus.errors import (
    BusTimeout,
    InvalidSubject,
    NoResponders,
    PayloadTooLarge,
)
from common.bus.port import Message
from contracts.codec import MAX_MESSAGE_BYTES
from tests.contract.bus_world import PATIENCE_S, World, answer, drain, soon, unique, until, value_of


async def test_a_message_reaches_every_subscriber_whose_pattern_matches(world: World) -> None:
    """Exact subjects, `*` for one token and `>` for the rest; headers and payload arrive as they were sent."""
    root = unique("pd")
    async with world.open() as one, world.open() as other:
        patterns = [f"{root}.a.b", f"{root}.*.b", f"{root}.>", f"{root}.*", f"{root}.a.b.c"]
        subscriptions = [await other.subscribe(pattern) for pattern in patterns]
        headers = {"pd-type": "test", "traceparent": "00-1"}
        await one.publish(f"{root}.a.b", b"\x00data", headers)
        for subscription in subscriptions[:3]:
            message = await soon(anext(subscription))
            assert (message.subject, message.data, dict(message.headers)) == (f"{root}.a.b", b"\x00data", headers)
            assert message.reply == ""
            await message.respond(b"nobody asked")
        for subscription, pattern in zip(subscriptions[3:], (f"{root}.z", f"{root}.a.b.c"), strict=True):
            await one.publish(pattern, b"mine")
            assert (await soon(anext(subscription))).data == b"mine"


async def test_messages_keep_their_order(world: World) -> None:
    """One sender, one subscriber: first in, first out, also of an empty payload."""
    subject = unique("pd.order")
    async with world.open() as one, world.open() as other:
        subscription = await other.subscribe(subject)
        sent = [b"", *(str(number).encode() for number in range(500))]
        for data in sent:
            await one.publish(subject, data)
        assert [(await soon(anext(subscription))).data for _ in sent] == sent


async def test_one_member_of_a_queue_group_gets_each_message(world: World) -> None:
    """A group shares, others get everything."""
    subject = unique("pd.group")
    async with world.open() as one, world.open() as other:
        members = [await bus.subscribe(subject, queue_group="g") for bus in (one, other)]
        plain = await one.subscribe(subject)
        for number in range(40):
            await one.publish(subject, str(number).encode())
        assert len([await soon(anext(plain)) for _ in range(40)]) == 40
        shared: list[bytes] = []
        done = asyncio.Event()

        async def collect(subscription: AsyncIterator[Message]) -> None:
            async for message in subscription:
                shared.append(message.data)
                if len(shared) == 40:
                    done.set()

        async with asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(collect(member), name="member")
            await soon(done.wait())
            await one.flush()
            for member in members:
                await member.unsubscribe()
        assert sorted(shared, key=int) == [str(number).encode() for number in range(40)]


async def test_a_full_subscription_drops_the_newest_and_counts(world: World) -> None:
    """`max_pending` bounds what waits; what waited comes, what did not fit is counted."""
    subject = unique("pd.full")
    async with world.open() as bus:
        small = await bus.subscribe(subject, max_pending=2)
        large = await bus.subscribe(subject)
        for number in range(5):
            await bus.publish(subject, str(number).encode())
        for _ in range(5):
            await soon(anext(large))
        assert small.dropped == 3
        assert [(await soon(anext(small))).data for _ in range(2)] == [b"0", b"1"]


async def test_unsubscribing_ends_the_iteration(world: World) -> None:
    """Also for a task that waits, twice is fine, and a bus that closes ends it too."""
    subject = unique("pd.end")
    async with world.open() as bus:
        async with await bus.subscribe(subject) as subscription:
            waiting = asyncio.get_running_loop().create_task(drain(subscription))
            await bus.publish(subject, b"x")
            await until(lambda: value_of(waiting.done() or subscription.dropped == 0))
        assert await soon(waiting) <= 1
        await subscription.unsubscribe()
        left_open = asyncio.get_running_loop().create_task(drain(await bus.subscribe(subject)))
    assert await soon(left_open) == 0


async def test_a_request_gets_its_answer(world: World) -> None:
    """Many in flight at once, each gets its own, with headers."""
    subject = unique("pd.rpc")
    async with world.open() as client, world.open() as server:
        serving = await answer(server, subject, b"re:")

        async def ask(number: int) -> None:
            reply = await client.request(subject, str(number).encode(), headers={"pd-type": "question"})
            assert (reply.data, reply.headers["pd-type"]) == (f"re:{number}".encode(), "answer")

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(ask(number), name=f"ask-{number}")
    await soon(serving)


async def test_a_request_to_nobody_fails_fast(world: World) -> None:
    """NoResponders long before the timeout, also right after the last subscriber left."""
    subject = unique("pd.nobody")
    async with world.open() as bus:
        with pytest.raises(NoResponders):
            await soon(bus.request(subject, b"", timeout=3600))
        async with await bus.subscribe(subject):
            pass
        await bus.flush()
        with pytest.raises(NoResponders):
            await soon(bus.request(subject, b"", timeout=3600))


async def test_a_request_without_an_answer_times_out(world: World) -> None:
    """BusTimeout after the timeout; at once if no time was left."""
    subject = unique("pd.mute")
    async with world.open() as bus, await bus.subscribe(subject) as mute:
        with pytest.raises(BusTimeout):
            await soon(bus.request(subject, b"", timeout=0.05))
        with pytest.raises(BusTimeout):
            await bus.request(subject, b"never sent", timeout=0)
        late = await soon(anext(mute))
        await late.respond(b"too late is nobody's")
        await bus.publish(subject, b"marker")
        assert (await soon(anext(mute))).data == b"marker"


@pytest.mark.parametrize(("timeout_s", "told"), [(0.0002, "over"), (0.05, "within 0.050 s"), (-1.0, "no time")])
async def test_a_request_whose_time_was_over_says_so(world: World, timeout_s: float, told: str) -> None:
    """The text of a timeout names the time that the request had, unless it had none worth naming."""
    subject = unique("pd.late")
    async with world.open() as bus, await bus.subscribe(subject):
        with pytest.raises(BusTimeout, match=told) as caught:
            await soon(bus.request(subject, b"", timeout=timeout_s))
    assert subject in caught.value.message
    assert "0.000" not in caught.value.message


async def test_payload_and_headers_together_are_capped(world: World) -> None:
    """The largest message passes; one byte more, in payload or header, is refused and harms nothing."""
    subject = unique("pd.cap")
    async with world.open() as bus:
        subscription = await bus.subscribe(subject)
        await bus.publish(subject, bytes(MAX_MESSAGE_BYTES))
        assert len((await soon(anext(subscription))).data) == MAX_MESSAGE_BYTES
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subject, bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subject, bytes(MAX_MESSAGE_BYTES), {"a": "b"})
        with pytest.raises(PayloadTooLarge):
            await bus.request(subject, bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(PayloadTooLarge):
            bus.publish_event(subject, bytes(MAX_MESSAGE_BYTES), message_id="1")
        await bus.publish(subject, b"still connected")
        assert (await soon(anext(subscription))).data == b"still connected"


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a b", "a.*", "a.>", "a\r\nPUB x 0"])
async def test_bad_subjects_are_refused(world: World, subject: str) -> None:
    """Empty tokens, white space and wildcards do not leave the process."""
    async with world.open() as bus:
        for call in (bus.publish, bus.request):
            with pytest.raises(InvalidSubject):
                await call(subject, b"")
        with pytest.raises(InvalidSubject):
            bus.publish_event(subject, b"", message_id="1")


async def test_bad_patterns_and_headers_are_refused(world: World) -> None:
    """A `>` in the middle, half-wild tokens, and headers that would break the protocol."""
    async with world.open() as bus:
        for pattern in ("a.>.b", "a.b*", "", "a b"):
            with pytest.raises(InvalidSubject):
                await bus.subscribe(pattern)
        for headers in ({"a b": "c"}, {"": "c"}, {"a": "c\r\nd: e"}, {"a": "ä"}, {"a": " c"}):
            with pytest.raises(InvalidSubject):
                await bus.publish("pd.x", b"", headers)
