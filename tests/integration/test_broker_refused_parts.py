"""Reports of parts that no worker can have sent: refused, counted and explained. Those that only come late are neither."""

from __future__ import annotations

import msgspec
from structlog.testing import capture_logs

from common.bus.memory import MemoryServer
from contracts import subjects
from contracts.codec import encode
from contracts.handoff import CommitHandoff, PartsReport, RunPrefill
from contracts.pull import Transfer
from tests.integration.broker_world import HANDOFF, World, in_world

OTHER = "r7-0"
OLD = "an-earlier-start"


async def told(world: World, report: PartsReport, *, about: str = "") -> None:
    """Publish a report, and let the broker read it."""
    await world.prefill.bus.publish(subjects.parts(about or report.handoff_id), encode(report))
    await world.clock.sleep(0.1)


def num_refused(world: World) -> float:
    """How many reports of parts the broker has refused."""
    line = 'pdmesh_messages_refused_total{row="parts done"} '
    lines = world.metrics.exposition().decode().splitlines()
    return sum(float(each.removeprefix(line)) for each in lines if each.startswith(line))


def test_reports_of_parts_that_cannot_be_true_are_counted_and_explained() -> None:
    """An unknown handoff, another start, another handoff than the subject's: each counts once, says why, and moves nothing."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.submit(timeout_ms=500_000)
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.clock.sleep(0.1)
        before = world.broker.handoff(HANDOFF)
        own, _ = world.reports()
        pulled = world.reports(transfer=Transfer.PULL)[0]
        change = msgspec.structs.replace
        cases = [
            (change(own, handoff_id=OTHER), "", f"{OTHER} is not known here"),
            (change(own, incarnation=OLD), "", f"{HANDOFF} belongs to ip of prefill-0, not to {OLD}"),
            (change(pulled, incarnation=OLD), "", f"{HANDOFF} belongs to id of decode-0, not to {OLD}"),
            (own, OTHER, f"handoff_id: 'r1-0' is not allowed; the rule is: as in the subject {subjects.parts(OTHER)}"),
        ]
        for number, (report, about, text) in enumerate(cases, start=1):
            with capture_logs() as lines:
                await told(world, report, about=about)
            assert num_refused(world) == number, text
            (line,) = [each for each in lines if each["event"] == "message_refused"]
            assert (line["row"], line["error_message"]) == ("parts done", text)
            assert line["subject"] == subjects.parts(about or report.handoff_id)
            await world.clock.sleep(60.0)  # the next one is logged again
        assert world.broker.handoff(HANDOFF) == before

    in_world(scenario)


def test_a_report_of_a_mixed_workers_request_is_refused() -> None:
    """Nothing is moved for it: whoever reports parts of it is not its worker."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.submit(mixed=True)
        with capture_logs() as lines:
            await told(world, world.reports()[0])
        (line,) = [each for each in lines if each["event"] == "message_refused"]
        assert line["error_message"] == f"{HANDOFF} has no prefill worker"
        assert num_refused(world) == 1

    in_world(scenario)


def test_late_and_repeated_reports_are_no_refused_ones() -> None:
    """Twice, older than the last, after the commit, after the end: all of it happens to a healthy mesh."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.submit()
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        reports = world.reports(revision=2)
        await world.publish_parts(*reports, *reports, *world.reports(revision=1))
        await world.finish_prefill()
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        await world.publish_parts(*world.reports(revision=3))
        await world.take_over()
        await world.end()
        await world.until(lambda: not world.broker.num_in_flight)
        await told(world, reports[0])
        assert num_refused(world) == 0

    in_world(scenario)


def test_while_another_broker_may_lead_an_unknown_handoff_is_its_own() -> None:
    """What that one has begun is unknown here, and nobody's fault."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        overdue = [True]
        world.broker._is_mute = lambda: overdue[0]
        await told(world, world.reports()[0])
        assert num_refused(world) == 0
        overdue[0] = False
        await told(world, world.reports()[0])
        assert num_refused(world) == 1

    in_world(scenario)
