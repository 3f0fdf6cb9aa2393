"""The broker as its callers see it: over the in-memory bus, in virtual time, with workers that do as they are told."""

from __future__ import annotations

import msgspec

from common.bus.memory import MemoryServer
from common.bus.storage import WORKERS_CONFIG
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffState,
    PartsAnswer,
    PartsReport,
    QueryParts,
    ReleaseHandoff,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.requests import Accepted, CancelWork, FinishReason, Refused, WorkerRef
from tests.integration.broker_world import HANDOFF, MIXED, PREFILL, World, in_world
from tests.integration.handoff_stages import OK, assert_released, committed, forgotten, prefilling
from tests.integration.scripted_worker import GRANT, losing, refusing


def test_a_handoff_from_submit_to_end() -> None:
    """Reserve, run, parts, commit, takeover, end: each worker hears what it must, once, and the record says finished."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        (reserve,) = world.decode.of(ReserveDecode)
        assert (reserve.incarnation, reserve.source, reserve.num_prompt_tokens) == ("id", PREFILL, 40)
        (run,) = world.prefill.of(RunPrefill)
        assert (run.grant, run.incarnation, run.prompt_hash) == (GRANT, "ip", "h")
        (commit,) = world.decode.of(CommitHandoff)
        assert (commit.first_token, commit.incarnation) == (5, "id")
        assert (await world.record()).state is HandoffState.COMMITTED
        assert not world.prefill.of(ReleaseHandoff)
        assert await world.take_over() == OK
        await world.until(lambda: bool(world.prefill.of(ReleaseHandoff)))
        assert await world.end() == OK
        await forgotten(world)
        record = await world.record()
        assert (record.state, record.num_tokens, record.grant) == (HandoffState.FINISHED, 12, GRANT)
        assert not world.decode.of(ReleaseHandoff)
        assert world.frames.empty()
        for again in (world.take_over(), world.end(), world.finish_prefill(), world.submit()):
            assert await again == OK
        assert len(world.decode.of(ReserveDecode)) == len(world.prefill.of(RunPrefill)) == 1

    in_world(scenario)


def test_events_tell_the_whole_story() -> None:
    """The stream has every transition with its timings, and the metrics count them."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await world.take_over()
        await world.end()
        await forgotten(world)
        events = {event.event: event for event in await world.events()}
        assert set(events) == {
            EventName.REQUEST_SUBMITTED,
            EventName.DECODE_RESERVED,
            EventName.PREFILL_ACCEPTED,
            EventName.RANK_PUSHED,
            EventName.LEDGER_CLOSED,
            EventName.PREFILL_FINISHED,
            EventName.HANDOFF_COMMITTED,
            EventName.TAKEN_OVER,
            EventName.PREFILL_RELEASED,
            EventName.DECODE_RELEASED,
            EventName.REQUEST_FINISHED,
        }
        assert all(event.prefill_worker == "prefill-0" for event in events.values())
        assert events[EventName.DECODE_RESERVED].prepare_ms == 1.5
        assert events[EventName.DECODE_RESERVED].rpc_ms is not None
        assert events[EventName.RANK_PUSHED].num_bytes == 1000
        assert events[EventName.LEDGER_CLOSED].num_bytes == 2000
        assert events[EventName.TAKEN_OVER].total_ms == 0.75
        assert events[EventName.REQUEST_FINISHED].finish_reason == "length"
        text = world.metrics.exposition().decode()
        assert 'pdmesh_broker_handoffs_total{reason="length",state="finished"} 1.0' in text
        assert "pdmesh_broker_pushed_bytes_total 2000.0" in text
        assert 'pdmesh_broker_handoffs_in_flight{state="decoding"} 0.0' in text
        assert 'pdmesh_broker_handoffs_in_flight{state="releasing"} 0.0' in text
        assert 'pdmesh_handoff_phase_seconds_count{phase="commit_rpc",source_rank=""} 1.0' in text

    in_world(scenario)


def test_no_commit_before_every_rank_has_reported() -> None:
    """With one rank's report missing the broker asks for it, and commits only then."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        first, second = world.reports()
        await world.publish_parts(first)
        await world.finish_prefill()
        await world.until(lambda: len(world.prefill.of(QueryParts)) > 2)
        assert not world.decode.of(CommitHandoff)
        world.prefill.scripts["parts"] = lambda _query: PartsAnswer(handoff_id=HANDOFF, reports=(first, second))
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))

    in_world(scenario)


def test_a_refused_reserve_is_the_routers_to_know() -> None:
    """The submit was accepted; the refusal comes as the final frame, with its code, and decode is told to forget."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.decode.scripts["reserve"] = refusing(ErrorCode.OVERLOADED)
        assert await world.submit() == OK
        frame = await world.frames.get()
        assert frame.final
        assert frame.error is not None
        assert frame.error.code is ErrorCode.OVERLOADED
        await forgotten(world)
        assert len(world.decode.of(ReleaseHandoff)) == 1
        assert not world.prefill.of(RunPrefill)
        assert (await world.record()).state is HandoffState.FAILED
        assert world.frames.empty()

    in_world(scenario)


def test_a_cancel_reaches_everybody_that_was_told() -> None:
    """While prefill computes: hints to both, releases to both, the record says cancelled, and nothing is committed."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        assert await world.cancel() == OK
        assert await world.cancel() == OK
        await forgotten(world)
        assert_released(world)
        assert world.hints == [CancelWork(handoff_id=HANDOFF)] * 2
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        assert (await world.record()).state is HandoffState.CANCELLED
        assert not world.decode.of(CommitHandoff)
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.CANCELLED
        assert world.frames.empty()

    in_world(scenario)


def test_a_prefill_that_fails_frees_decode_at_once() -> None:
    """Its error is the request's error."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="rank 1 could not push")
        began = world.clock.monotonic()
        await world.finish_prefill(first_token=None, error=error)
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.TRANSFER_FAILED
        await forgotten(world)
        assert_released(world)
        assert world.clock.monotonic() - began < 1.0

    in_world(scenario)


def test_a_first_token_that_ends_the_request() -> None:
    """No commit, both released, and no word to the router: prefill has streamed the end."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        await world.publish_parts()
        await world.finish_prefill(finish_reason=FinishReason.STOP)
        await forgotten(world)
        assert_released(world)
        assert not world.decode.of(CommitHandoff)
        record = await world.record()
        assert (record.state, record.num_tokens) == (HandoffState.FINISHED, 1)
        assert world.frames.empty()

    in_world(scenario)


def test_a_worker_that_signs_off_fails_its_handoffs() -> None:
    """Decode's record is deleted: prefill is told to stop, and the router may try elsewhere."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        del world.decode.scripts["alive"]
        await (await world.bus.ensure_bucket(WORKERS_CONFIG)).delete("decode-0")
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.WORKER_LOST
        assert "decode-0" in frame.error.message
        await forgotten(world)
        assert_released(world)

    in_world(scenario)


def test_a_worker_that_falls_silent_is_lost() -> None:
    """No heartbeat for a lease: the same, by silence alone."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        del world.prefill.scripts["alive"]
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.WORKER_LOST
        assert "prefill-0" in frame.error.message

    in_world(scenario)


def test_a_restarted_worker_is_another_worker() -> None:
    """A new incarnation fails what the old one had, its plans are dropped, submits for the old one are refused; it is counted."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        assert world.broker._plans.num_pairs == 1
        assert b"pdmesh_broker_workers_replaced_total 0.0" in world.metrics.exposition()
        world.decode.ref = WorkerRef(worker_id="decode-0", incarnation="id2")
        await world.decode.announce()
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.WORKER_LOST
        assert world.broker._plans.num_pairs == 0
        assert b"pdmesh_broker_workers_replaced_total 1.0" in world.metrics.exposition()
        answer = await world.submit(handoff_id="r2-0", request_id="r2")
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.INCARNATION_CHANGED

    in_world(scenario)


def test_prefill_may_go_once_decode_has_the_request() -> None:
    """After the commit a lost prefill worker is nobody's loss."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        del world.prefill.scripts["alive"]
        await (await world.bus.ensure_bucket(WORKERS_CONFIG)).delete("prefill-0")
        await world.clock.sleep(1.0)
        await world.take_over()
        await world.end()
        await forgotten(world)
        assert (await world.record()).state is HandoffState.FINISHED
        assert world.frames.empty()

    in_world(scenario)


def test_the_deadline_ends_a_handoff_that_nobody_ends() -> None:
    """Prefill never finishes: both are released, the router hears of the deadline, once."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit(timeout_ms=3_000) == OK
        frame = await world.frames.get()
        assert 3.0 <= world.clock.monotonic() < 4.0
        assert frame.error is not None
        assert frame.error.code is ErrorCode.DEADLINE_EXCEEDED
        await forgotten(world)
        assert_released(world)
        assert (await world.record()).state is HandoffState.FAILED
        assert world.frames.empty()

    in_world(scenario)


def test_a_lost_answer_is_asked_for_again() -> None:
    """Delivery is repeated with the same id and less time; the handoff goes on."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        for worker, verb in ((world.decode, "reserve"), (world.prefill, "run"), (world.decode, "commit")):
            default = worker.scripts.get(verb, lambda message: Accepted(handoff_id=message.handoff_id))
            worker.scripts[verb] = losing(1, default)
        await committed(world)
        first, second = world.decode.of(ReserveDecode)
        assert second.timeout_ms < first.timeout_ms
        assert second.handoff_id == first.handoff_id
        await world.take_over()
        await world.end()
        await forgotten(world)
        assert (await world.record()).state is HandoffState.FINISHED

    in_world(scenario)


def test_a_wrong_report_fails_the_handoff() -> None:
    """A part that nobody planned is a protocol error, not a reason to stop the broker."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        first, _ = world.reports()
        await world.publish_parts(_with_layer(first, 99))
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.PROTOCOL
        assert "layer 99" in frame.error.message
        await forgotten(world)
        assert_released(world)

    in_world(scenario)


def test_reports_of_another_start_are_refused() -> None:
    """A message of an earlier incarnation changes nothing, and its sender is told."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        answer = await world.finish_prefill(incarnation="old")
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.INCARNATION_CHANGED
        assert (await world.record()).state is HandoffState.PREFILLING

    in_world(scenario)


def test_a_mixed_request_needs_no_transfer() -> None:
    """The same machine: run, accepted, ended."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit(mixed=True) == OK
        await world.until(lambda: bool(world.mixed.of(RunMixed)))
        (run,) = world.mixed.of(RunMixed)
        assert (run.incarnation, run.num_prompt_tokens) == (MIXED.incarnation, 40)
        assert await world.end(MIXED.incarnation) == OK
        await forgotten(world)
        assert (await world.record()).state is HandoffState.FINISHED
        assert world.frames.empty()
        assert not world.mixed.of(ReleaseHandoff)

    in_world(scenario)


def test_an_outage_of_the_bus_is_waited_out() -> None:
    """The server is away for seconds in the middle of a prefill: nothing that was acknowledged is lost."""

    async def scenario(world: World, server: MemoryServer) -> None:
        await prefilling(world)
        server.go_down()
        await world.clock.sleep(8.0)
        server.come_back()
        await world.finish_prefill()
        await world.until(lambda: bool(world.prefill.of(QueryParts)))
        await world.publish_parts()
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        await world.take_over()
        await world.end()
        await forgotten(world)
        assert (await world.record()).state is HandoffState.FINISHED

    in_world(scenario)


def test_a_new_broker_goes_on_with_what_was_committed() -> None:
    """The commit is sent again, and the request ends as if nothing had happened."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await world.stop_broker()
        await world.start_broker()
        await world.until(lambda: len(world.decode.of(CommitHandoff)) > 1)
        first, second = world.decode.of(CommitHandoff)
        assert (second.first_token, second.num_cached_tokens) == (first.first_token, first.num_cached_tokens)
        assert await world.take_over() == OK
        assert await world.end() == OK
        await forgotten(world)
        assert (await world.record()).state is HandoffState.FINISHED
        assert world.frames.empty()

    in_world(scenario)


def test_ended_handoffs_are_forgotten_in_time() -> None:
    """After their time they are unknown, but their key still refuses another request and accepts the same."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        await world.cancel()
        await forgotten(world)
        await world.clock.sleep(2.0)
        assert world.broker.handoff(HANDOFF) is None
        answer = await world.cancel()
        assert isinstance(answer, Refused)
        assert await world.submit() == OK
        assert len(world.decode.of(ReserveDecode)) == 1

    in_world(scenario, keep_ended_s=1.0)


def _with_layer(report: PartsReport, layer: int) -> PartsReport:
    part = msgspec.structs.replace(report.parts[0], layer=layer)
    return msgspec.structs.replace(report, parts=(part, *report.parts[1:]))
