"""What can be measured of a handoff at the broker: the same figures in events, in one log line and in histograms."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from common.bus.memory import MemoryServer
from common.runtime.trace import new_trace, within
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffRecord,
    HandoffState,
    PromptTimes,
    PullHandoff,
    Released,
    ReleaseHandoff,
    RunMixed,
    RunPrefill,
)
from contracts.manifest import Role
from contracts.phases import PHASE_FIELDS, Phase, phases_of, phases_of_prompt
from contracts.pull import Transfer
from contracts.requests import Accepted, FinishReason
from contracts.subjects import WorkerVerb
from contracts.trace import read_trace
from services.broker.core.turn import MAX_NAMED_PARTS
from tests.integration.broker_world import DECODE, HANDOFF, MIXED, World, in_world

OK = Accepted(handoff_id=HANDOFF)
TIMES = PromptTimes(queue_ms=2.5, compute_ms=40.0)
PHASES = {str(phase): value for phase, value in phases_of_prompt(TIMES)}


async def committed(world: World, submitted: bool = False) -> None:
    """Bring the handoff to where decode was asked to commit."""
    if not submitted:
        assert await world.submit() == OK
    await world.until(lambda: bool(world.prefill.of(RunPrefill)))
    await world.publish_parts()
    assert await world.finish_prefill() == OK
    if world.pulled:
        await world.until(lambda: bool(world.decode.of(PullHandoff)))
        await world.publish_parts(*world.reports(transfer=Transfer.PULL))
        assert await world.finish_pull() == OK
    await world.until(lambda: bool(world.decode.of(CommitHandoff)))


async def mixed_begun(world: World) -> None:
    """A request runs on the mixed worker."""
    assert await world.submit(mixed=True) == OK
    await world.until(lambda: bool(world.mixed.of(RunMixed)))
    await world.until(lambda: world.broker.handoff(HANDOFF).run_accepted)  # type: ignore[union-attr]


async def over(world: World) -> None:
    """Wait until nothing is in flight any more."""
    await world.until(lambda: world.broker.num_in_flight == 0)


def samples(world: World, name: str) -> dict[tuple[str, ...], float]:
    """Values of one series by its labels' values, in the order of the labels' names."""
    text = world.metrics.exposition().decode()
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def last_line(lines: list[MutableMapping[str, Any]]) -> MutableMapping[str, Any]:
    """The one line about the handoff."""
    (line,) = [line for line in lines if line["event"] == "handoff_finished"]
    return line


def test_every_phase_is_in_the_events_in_one_line_and_in_a_histogram() -> None:
    """Three ways to the same figures: each phase is told once, and none of them outlasts the whole."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.pulls(Role.CONV, Role.SSM)
        with capture_logs() as lines:
            await committed(world)
            await world.take_over()
            await world.end()
            await over(world)
        told: dict[tuple[str, str], float] = {}
        for event in await world.events():
            rank = "" if event.source_rank is None else str(event.source_rank)
            told |= {(str(phase), rank): value for phase, value in phases_of(event)}
        assert {phase for phase, _ in told} == set(Phase)
        assert {rank for phase, rank in told if phase == Phase.PUSH} == {"0", "1"}
        line = last_line(lines)
        assert line["phases_ms"] == {
            f"push_rank_{rank}" if phase == Phase.PUSH else phase: value for (phase, rank), value in told.items()
        }
        assert samples(world, "pdmesh_handoff_phase_seconds_count") == dict.fromkeys(told, 1.0)
        sums = samples(world, "pdmesh_handoff_phase_seconds_sum")
        assert sums == pytest.approx({place: value / 1e3 for place, value in told.items()})
        assert (line["state"], line["finish_reason"], line["num_tokens"]) == ("finished", "length", 12)
        assert (line["bytes"], line["num_parts"]) == (4000, samples(world, "pdmesh_broker_parts_total")[()])
        assert line["duration_ms"] == told[Phase.TOTAL, ""]
        assert (told[Phase.RESPONSE_PREPARE, ""], told[Phase.RESPONSE_RPC, ""]) == (1.25, 0.75)

    in_world(scenario)


def test_every_field_of_a_phase_is_one_of_the_event() -> None:
    """The table names no field that there is not, and each phase once a way to end."""
    assert {phase for _, _, phase in PHASE_FIELDS} == set(Phase)
    assert sum(phase is Phase.TOTAL for _, _, phase in PHASE_FIELDS) == 3
    assert len(PHASE_FIELDS) == len(set(PHASE_FIELDS)) == len(Phase) + 2


def test_a_stop_string_finishes_the_handoff_with_its_tokens() -> None:
    """The router saw the end: finished, by reason stop, with the tokens that the router had; decode is released."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        with capture_logs() as lines:
            await committed(world)
            await world.take_over()
            reason = FinishReason.STOP
            assert await world.cancel("a stop string was met", num_tokens=7, finish_reason=reason) == OK
            await over(world)
        record = await world.record()
        assert (record.state, record.finish_reason, record.num_tokens) == (HandoffState.FINISHED, reason, 7)
        assert record.error is None
        assert world.decode.of(ReleaseHandoff)
        assert len(world.hints) == 1
        assert world.frames.empty()
        events = {event.event: event for event in await world.events()}
        assert EventName.REQUEST_CANCELLED not in events
        assert (events[EventName.REQUEST_FINISHED].num_tokens, last_line(lines)["num_tokens"]) == (7, 7)
        assert samples(world, "pdmesh_broker_handoffs_total") == {("stop", "finished"): 1.0}

    in_world(scenario)


def test_a_stop_before_the_commit_is_a_cancel() -> None:
    """No token can have been sent yet, so there is nothing that could be complete."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert await world.cancel("a stop string was met", finish_reason=FinishReason.STOP) == OK
        await over(world)
        assert (await world.record()).state is HandoffState.CANCELLED

    in_world(scenario)


def test_a_cancelled_handoff_counts_its_tokens() -> None:
    """Those that the router had when nobody waited any more."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await world.take_over()
        assert await world.cancel(num_tokens=5) == OK
        await over(world)
        record = await world.record()
        assert (record.state, record.num_tokens) == (HandoffState.CANCELLED, 5)
        (end,) = [event for event in await world.events() if event.event is EventName.REQUEST_CANCELLED]
        assert end.num_tokens == 5
        assert samples(world, "pdmesh_broker_handoffs_total") == {("cancelled", "cancelled"): 1.0}

    in_world(scenario)


def test_the_deadline_names_the_parts_that_never_came() -> None:
    """All of rank 1 and half of one part of rank 0: named up to a bound, and counted in full."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit(timeout_ms=2_000) == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        report = world.reports()[0]
        head = next(part for part in report.parts if part.role is Role.KEY)
        rest = [part for part in report.parts if part is not head]
        half = msgspec.structs.replace(head, ranges=((0, 16), (32, 36)))
        await world.publish_parts(msgspec.structs.replace(report, parts=(half, *rest)))
        assert await world.finish_prefill() == OK
        await over(world)
        (end,) = [event for event in await world.events() if event.event is EventName.REQUEST_FAILED]
        assert end.error is not None
        assert end.error.code is ErrorCode.DEADLINE_EXCEEDED
        num_owed = 1 + len(world.reports()[1].parts)
        assert end.num_missing_parts == num_owed
        assert f"{num_owed} of {2 * len(report.parts)} parts of the cache had not arrived" in end.error.message
        assert len(end.missing_parts) == min(MAX_NAMED_PARTS, num_owed)
        name = f"target {head.role} of layer {head.layer} for destination rank 0 from source rank 0"
        assert end.missing_parts[0] == f"{name}: [16, 32), [36, 40)"
        assert all("source rank 1: [0, " in part for part in end.missing_parts[1:])
        assert samples(world, "pdmesh_broker_missing_parts_total") == {(): float(num_owed)}

    in_world(scenario)


def test_one_trace_goes_through_messages_events_and_the_record() -> None:
    """What the broker sends for a request names the request's trace, whosever message made it do so."""

    async def scenario(world: World, server: MemoryServer) -> None:
        tap = await server.connect().subscribe(">", max_pending=10_000)
        router, worker = new_trace(), new_trace()
        with within(router):
            assert await world.submit() == OK
        with within(worker):
            await committed(world, submitted=True)
            await world.take_over()
            await world.end()
        await over(world)
        record = await world.record()
        broker = read_trace({"traceparent": record.traceparent})
        assert broker is not None
        assert broker.trace_id == router.trace_id
        events = await world.events()
        assert {(event.trace_id, event.span_id, event.parent_span_id) for event in events} == {
            (router.trace_id, broker.span_id, router.span_id)
        }
        asked = [
            each for each in tap._waiting if each.subject.startswith("pd.v1.rpc.") and ".broker." not in each.subject
        ]
        verbs = {subjects.verb_of(each.subject): each.headers.get("traceparent") for each in asked}
        assert verbs.pop("handoffs") is None  # a question of the broker's own
        assert verbs.keys() >= {"describe", "reserve", "run", "commit", "release"}
        assert set(verbs.values()) == {record.traceparent}

    in_world(scenario)


def test_a_new_broker_goes_on_with_the_trace() -> None:
    """It is kept in the record: the second broker is one more hop of the same request."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        with within(new_trace()) as router:
            assert await world.submit() == OK
        assert router is not None
        await committed(world, submitted=True)
        await world.stop_broker()
        first = await world.record()
        await world.start_broker()
        await world.take_over()
        await world.end(DECODE.incarnation)
        await over(world)
        (end,) = [event for event in await world.events() if event.event is EventName.REQUEST_FINISHED]
        before = read_trace({"traceparent": first.traceparent})
        assert before is not None
        assert (end.trace_id, end.parent_span_id) == (router.trace_id, before.span_id)

    in_world(scenario)


def test_a_broken_trace_is_as_if_there_were_none() -> None:
    """The request is served; its events have no trace."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        request = encode(world.submit_request())
        headers = {"traceparent": "00-not-a-trace"}
        reply = await world.bus.request("pd.v1.rpc.broker.0.submit", request, headers=headers)
        assert decode(reply.data, Accepted) == OK
        record: HandoffRecord = await world.record()
        assert record.traceparent == ""
        assert {event.trace_id for event in await world.events()} == {""}

    in_world(scenario)


def test_the_places_of_handoffs_are_counted() -> None:
    """A handoff is in one place at a time, and in none when it is over."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        def places() -> dict[tuple[str, ...], float]:
            return {key: value for key, value in samples(world, "pdmesh_broker_handoffs_in_flight").items() if value}

        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert places() == {("prefilling",): 1.0}
        await committed(world, submitted=True)
        assert places() == {("committed",): 1.0}
        await world.take_over()
        assert places() == {("decoding",): 1.0}
        await world.end()
        await over(world)
        assert places() == {}

    in_world(scenario)


def test_the_broker_counts_what_the_end_tells_once() -> None:
    """One figure in the line and in the histogram, though the report comes twice; the worker has published the event."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        with capture_logs() as lines:
            await mixed_begun(world)
            await world.end(MIXED.incarnation, prompt=TIMES)
            await world.end(MIXED.incarnation, prompt=TIMES)
            await over(world)
        line = last_line(lines)
        assert line["phases_ms"].items() >= PHASES.items()
        counted = samples(world, "pdmesh_handoff_phase_seconds_count")
        assert [counted[str(phase), ""] for phase in (Phase.PREFILL_QUEUE, Phase.PREFILL_COMPUTE)] == [1.0, 1.0]
        sums = samples(world, "pdmesh_handoff_phase_seconds_sum")
        assert sums["prefill_compute", ""] == TIMES.compute_ms / 1e3
        assert EventName.PREFILL_FINISHED not in {event.event for event in await world.events()}

    in_world(scenario)


def test_the_broker_counts_what_a_release_tells() -> None:
    """The router saw a stop string: the worker reports no end, but answers the release."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.mixed.scripts[WorkerVerb.RELEASE] = lambda message: Released(handoff_id=message.handoff_id, prompt=TIMES)
        with capture_logs() as lines:
            await mixed_begun(world)
            await world.cancel("a stop string was met", num_tokens=7, finish_reason=FinishReason.STOP)
            await over(world)
        assert world.mixed.of(ReleaseHandoff)
        assert last_line(lines)["phases_ms"].items() >= PHASES.items()

    in_world(scenario)


def test_an_end_without_figures_leaves_them_out() -> None:
    """A request that failed before its first token has none, and none are made up."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        with capture_logs() as lines:
            await mixed_begun(world)
            error = ErrorInfo(code=ErrorCode.INTERNAL, message="the engine is dead")
            await world.end(MIXED.incarnation, finish_reason=None, error=error)
            await over(world)
        assert not PHASES.keys() & last_line(lines)["phases_ms"].keys()

    in_world(scenario)
