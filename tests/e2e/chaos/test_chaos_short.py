"""Faults of each kind, one after the other, on a mesh of real processes under 16 streams: every promise is kept."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from common.runtime.clock import SystemClock
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.faults import Action, Fault, Happened, draw
from tests.e2e.chaos.outages import Allowance, NatsWatch, Outage, freezes, time_lost
from tests.e2e.chaos.report import judge, make_report
from tests.e2e.chaos.run import ChaosSettings, run_chaos
from tests.e2e.chaos.streams import Ending, Outcome

PAIR = (("prefill", "tp=2"), ("decode", "tp=1"))
SCRIPT = (
    Fault(action=Action.KILL, target="decode-0", phase="sending"),
    Fault(action=Action.KILL, target="prefill-0/rank-1", phase="computing"),
    Fault(action=Action.STOP, target="nats", phase="decoding"),
)


async def test_promises_are_kept_under_three_faults() -> None:
    """No token is lost, repeated or foreign, every stream ends, and nothing is left; what died serves again."""
    settings = ChaosSettings(
        seed=5, script=SCRIPT, pause_s=(0.5, 0.5), workers=PAIR, num_brokers=1, num_sampled=2, transport="tcp"
    )
    report = await run_chaos(settings, print)
    print(report.text)
    assert report.violations == ()


@pytest.mark.long
@pytest.mark.parametrize(("transport", "seed"), [("shm", 1), ("tcp", 2)])
async def test_promises_are_kept_under_many_faults(transport: str, seed: int) -> None:
    """Two minutes of faults by chance on each transport, long freezes and two brokers among them."""
    report = await run_chaos(ChaosSettings(seed=seed, duration_s=120.0, transport=transport), print)
    print(report.text)
    assert report.violations == ()


def _outcome(ending: Ending, *token_ids: int, code: str = "worker_lost", at: float = 10.0) -> Outcome:
    case = Case(name="c", prompt=(1,), parameters={}, expected=(1, 2, 3))
    return Outcome(case=case, started_at=at, ended_at=at + 1, ending=ending, code=code, token_ids=list(token_ids))


@pytest.mark.parametrize(
    ("outcome", "strict", "broken"),
    [
        (_outcome(Ending.WHOLE, 1, 2, 3), True, ""),
        (_outcome(Ending.WHOLE, 1, 2), False, "came, of"),
        (_outcome(Ending.WHOLE, 1, 2, 2, 3), False, "came, of"),
        (_outcome(Ending.ERROR, 1, 2), False, ""),
        (_outcome(Ending.ERROR, 1, 2), True, "did not go on"),
        (_outcome(Ending.ERROR, 2), False, "came, of"),
        (_outcome(Ending.ERROR, code="None"), False, "does not say"),
        (_outcome(Ending.ERROR), True, ""),
        (_outcome(Ending.LATE, 1), False, "did not end in time"),
        (_outcome(Ending.CUT, 1), False, "without a word"),
        (_outcome(Ending.CUT, 1, at=100.0), False, ""),
        (_outcome(Ending.CUT, 1, at=130.0), False, "without a word"),
        (_outcome(Ending.CUT, code="ClientConnectorError", at=130.0), False, ""),
        (_outcome(Ending.CUT, code="ClientConnectorError", at=195.0), False, "without a word"),
    ],
)
def test_each_broken_promise_is_named(outcome: Outcome, strict: bool, broken: str) -> None:
    """What came too little, twice or wrong, what did not end, and what ended without a word; a dead router excuses the last."""
    killed = Happened(fault=Fault(action=Action.KILL, target="router"), began_at=100.5, ended_at=100.5)
    found = judge([outcome], [killed], strict=strict)
    assert [broken in each for each in found] == ([True] if broken else [])
    report = make_report([outcome], [killed], strict=strict, restarts=Counter(), more=("left behind",))
    assert len(report.violations) == len(found) + 1


def _out_of_time(code: str = "deadline_exceeded", *token_ids: int, took: float = 25.0) -> Outcome:
    case = Case(name="c", prompt=(1,), parameters={}, expected=(1, 2, 3))
    ending = Ending.ERROR
    return Outcome(case=case, started_at=100.0, ended_at=100 + took, ending=ending, code=code, token_ids=[*token_ids])


@pytest.mark.parametrize(
    ("outcome", "outages", "is_excused"),
    [
        (_out_of_time("deadline_exceeded", 1), [(101.0, 124.0)], True),  # 2 s left, and it needs 3
        (_out_of_time("deadline_exceeded", 1), [(90.0, 112.0), (111.0, 130.0)], True),
        (_out_of_time("deadline_exceeded", 1), [(101.0, 122.0)], False),  # 4 s left
        (_out_of_time("deadline_exceeded", 1), [(101.0, 113.0), (102.0, 113.5)], False),  # the same time twice
        (_out_of_time("deadline_exceeded", 1), [(60.0, 99.0), (125.5, 160.0)], False),  # before and after it
        (_out_of_time("deadline_exceeded", 1), [], False),
        (_out_of_time("deadline_exceeded", 1, took=40.0), [(126.0, 140.0)], False),  # only the router's answer was late
        (_out_of_time("worker_lost", 1), [(101.0, 124.0)], False),  # its time was not up
    ],
)
def test_only_who_was_left_too_little_time_is_excused(
    outcome: Outcome, outages: list[tuple[float, float]], is_excused: bool
) -> None:
    """What outages take of a stream's own time counts once; what is left is held against what its case takes in calm."""
    known = tuple(Outage(began_at=start, ended_at=end) for start, end in outages)
    allowance = Allowance(request_s=25.0, needed_s={"c": 3.0}, outages=known)
    found = judge([outcome], (), strict=True, allowance=allowance)
    assert ["did not go on" in each for each in found] == ([] if is_excused else [True])
    assert judge([outcome], (), strict=True) != []  # a run that knows of no outage excuses nobody
    report = make_report([outcome], (), strict=True, restarts=Counter(), more=(), allowance=allowance)
    assert f"in calm (3.0 s at most): {int(is_excused)}\n" in report.text


def test_an_excuse_hides_no_wrong_token() -> None:
    """Who ran out of time for a reason must still have had the beginning of what was due."""
    allowance = Allowance(needed_s={"c": 3.0}, outages=(Outage(began_at=100.0, ended_at=125.0),))
    found = judge([_out_of_time("deadline_exceeded", 2)], (), strict=True, allowance=allowance)
    assert ["came, of" in each for each in found] == [True]


def test_what_stood_still_is_an_outage_and_what_died_is_none() -> None:
    """A killed process is replaced by others; nobody replaces a frozen one before it is missed."""
    faults = [
        Happened(fault=Fault(action=action, target="decode-0"), began_at=float(number), ended_at=number + 0.5)
        for number, action in enumerate((Action.KILL, Action.FREEZE_SHORT, Action.STOP, Action.FREEZE_LONG))
    ]
    assert [each.began_at for each in freezes(faults)] == [1.0, 3.0]
    assert time_lost(freezes(faults), 1.25, 10.0) == 0.75


async def test_a_server_that_does_not_greet_is_an_outage() -> None:
    """From when it was silent until it greets again, for as long as it is away or stands still."""
    clock = SystemClock()
    greets = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greets:
            writer.write(b"INFO {}\r\n")
        await reader.read()
        writer.close()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await clock.sleep(0.01)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watch = NatsWatch(f"nats://127.0.0.1:{port}")
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        greets = False  # it stands still: whoever comes is let in and told nothing
        await until(lambda: watch.is_silent)
        greets = True
        await until(lambda: not watch.is_silent)
        server.close()  # it is gone: nobody is let in
        await until(lambda: watch.is_silent)
        back = await asyncio.start_server(serve, "127.0.0.1", port)
        await until(lambda: not watch.is_silent)
        watching.cancel()
    back.close()
    first, second = watch.outages
    assert first.began_at < first.ended_at <= second.began_at < second.ended_at


def test_every_process_and_phase_is_hit_by_chance() -> None:
    """A long run leaves nobody out."""
    rng = random.Random(1)
    faults = [draw(rng, ("prefill-0", "decode-0"), 2) for _ in range(2000)]
    targets = {fault.target for fault in faults}
    ranks = {f"{worker}/rank-{number}" for worker in ("prefill-0", "decode-0") for number in range(4)}
    assert targets == {"prefill-0", "decode-0", "broker", "broker-1", "nats", "router"} | ranks
    assert {fault.action for fault in faults} == set(Action)
    assert len({fault.phase for fault in faults}) == 8
