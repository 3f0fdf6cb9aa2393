"""Events in flight, in virtual time, with a server that answers when it is told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from common.bus.errors import BusUnavailable
from common.bus.nats_events import MAX_WAITING_EVENTS, EventPump
from common.bus.nats_requests import Answer, Fate, Requests, Told
from common.bus.nats_wire import Arrived
from common.bus.observer import NoObserver, RequestKind, RequestOutcome
from common.runtime.clock import Deadline
from common.runtime.virtual_time import VirtualClock, run_virtual

STORED = b'{"stream":"S","seq":7,"duplicate":true}'
WINDOW = 64


class Line(NoObserver):
    """Stands for the requests of a connection, and counts what is told of them."""

    def __init__(self) -> None:
        self.are_ready = True
        self.sent: list[str] = []
        self.waiting: dict[str, Told] = {}
        self.outcomes: list[RequestOutcome] = []

    def post(self, subject: str, _data: bytes, told: Told, *, headers: Any) -> str:
        """See `Requests.post`. Events are known by their message ids."""
        if not self.are_ready:
            raise BusUnavailable(subject, maybe_done=False)
        assert headers == {"Nats-Msg-Id": subject}
        self.sent.append(subject)
        inbox = f"{subject}-{len(self.sent)}"
        self.waiting[inbox] = told
        return inbox

    def forget(self, inbox: str) -> None:
        """See `Requests.forget`."""
        self.waiting.pop(inbox, None)

    def answer(self, answer: bytes | Answer = STORED, *, count: int = 1) -> None:
        """Answer the oldest that wait."""
        for inbox in list(self.waiting)[:count]:
            told = self.waiting.pop(inbox)
            told(Arrived(inbox, "", answer, {}) if isinstance(answer, bytes) else answer)

    def request_ended(self, kind: RequestKind, outcome: RequestOutcome, seconds: float) -> None:
        """See `BusObserver.request_ended`."""
        assert kind is RequestKind.STORE
        assert seconds >= 0
        self.outcomes.append(outcome)


@asynccontextmanager
async def pumping(clock: VirtualClock) -> AsyncIterator[tuple[EventPump, Line]]:
    """A pump on a line, closed at the end."""
    line = Line()
    async with asyncio.TaskGroup() as group:
        pump = EventPump(cast("Requests", line), clock, group, line)
        yield pump, line
        pump.close()


def take(pump: EventPump, *names: str) -> list[bool]:
    """Hand events over."""
    return [pump.take(name, b"data", {"Nats-Msg-Id": name}) for name in names]


def virtual(scenario: Callable[[VirtualClock], Awaitable[None]]) -> None:
    """Run a scenario."""

    async def main(clock: VirtualClock) -> None:
        await scenario(clock)

    run_virtual(main)


def names(count: int) -> list[str]:
    """So many events."""
    return [f"e{number}" for number in range(count)]


def test_events_are_sent_at_once_and_as_many_are_in_flight_as_may_be() -> None:
    """One more goes out with each answer, in order, and nothing is left when all are stored."""

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            assert all(take(pump, *names(WINDOW + 10)))
            assert line.sent == names(WINDOW)
            line.answer(count=3)
            assert line.sent == names(WINDOW + 3)
            assert not await pump.flush(Deadline.after(clock, 0.1))
            line.answer(count=WINDOW)
            line.answer(count=WINDOW)
            assert await pump.flush(Deadline.after(clock, 0.1))
            assert pump.dropped == 0
            assert line.outcomes == [RequestOutcome.ANSWERED] * (WINDOW + 10)

    virtual(scenario)


def test_what_was_not_stored_goes_again_after_a_pause_ahead_of_what_waits() -> None:
    """Without an answer, without anybody who stores it, over a lost connection, refused for the moment: all are repeated."""
    no_responders = Arrived("", "", b"", {"Status": "503"})
    busy = b'{"error":{"code":503,"err_code":10008,"description":"no leader"}}'

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            take(pump, "a", "b", "c", "d")
            line.answer(Fate.LOST)
            line.answer(no_responders)
            line.answer(busy)
            take(pump, "e")
            assert line.sent == ["a", "b", "c", "d"]  # while there is trouble nothing new is sent
            await clock.sleep(0.3)
            assert line.sent == ["a", "b", "c", "d", "a", "b", "c", "e"]
            await clock.sleep(4.6)
            assert len(line.sent) == 8
            await clock.sleep(0.5)  # five seconds after the first time d has still no answer
            assert line.sent[8:] == ["d", "a", "b", "c", "e"]
            while line.waiting:
                line.answer()
            assert await pump.flush(Deadline.after(clock, 0.1))
            assert pump.dropped == 0
            unavailable, nobody = RequestOutcome.UNAVAILABLE, RequestOutcome.NO_RESPONDERS
            assert line.outcomes[:3] == [unavailable, nobody, RequestOutcome.ANSWERED]
            assert RequestOutcome.TIMED_OUT in line.outcomes

    virtual(scenario)


def test_a_late_answer_to_what_was_sent_again_says_nothing() -> None:
    """Only the answer to the last delivery counts."""

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            take(pump, "a")
            await clock.sleep(5.5)
            assert line.sent == ["a", "a"]
            assert list(line.waiting) == ["a-2"]
            assert not await pump.flush(Deadline.after(clock, 0.0))

    virtual(scenario)


def test_a_refused_event_is_dropped_and_those_behind_it_go_on() -> None:
    """For good, or by somebody who is no stream."""

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            take(pump, "a", "b", "c")
            line.answer(b'{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum"}}')
            line.answer(b"hello")
            line.answer()
            assert await pump.flush(Deadline.after(clock, 0.1))
            assert line.sent == ["a", "b", "c"]
            assert pump.dropped == 2

    virtual(scenario)


def test_an_outage_is_waited_out_for_a_minute() -> None:
    """Then what is older is dropped, so that no repeat comes after the stream has forgotten its id."""

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            line.are_ready = False
            take(pump, "old")
            await clock.sleep(30)
            take(pump, "new")
            await clock.sleep(31)
            assert pump.dropped == 1
            line.are_ready = True
            await clock.sleep(0.3)
            assert line.sent == ["new"]

    virtual(scenario)


def test_too_many_are_dropped_and_so_is_what_is_left_at_the_end() -> None:
    """The bound is on what waits; whoever hands an event over hears that there was no room."""

    async def scenario(clock: VirtualClock) -> None:
        async with pumping(clock) as (pump, line):
            assert all(take(pump, *names(WINDOW + MAX_WAITING_EVENTS)))
            assert take(pump, "more") == [False]
            assert pump.dropped == 1
            line.answer(Fate.LOST, count=2)
            pump.close()
            pump.close()
            assert pump.dropped == 1 + WINDOW + MAX_WAITING_EVENTS
            assert line.waiting == {}
            assert take(pump, "late") == [False]
            assert pump.dropped == 2 + WINDOW + MAX_WAITING_EVENTS

    virtual(scenario)
