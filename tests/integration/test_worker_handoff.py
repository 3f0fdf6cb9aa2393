"""A prefill and a decode worker with fake engines on the in-memory bus, in virtual time; the test plays broker and router."""

from typing import Any

import msgspec
import pytest
import structlog

from common.engine.fake.engine import FakeEngine
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.handoff import (
    PartDigest,
    PrefillFinished,
    Released,
    RequestEnded,
    Reserved,
    ReserveDecode,
    TakenOver,
)
from contracts.requests import (
    Accepted,
    CancelWork,
    FinishReason,
    PromptFrame,
    Refused,
    SamplingParams,
    WorkerRef,
)
from contracts.subjects import WorkerVerb
from services.mixed.service import MixedService
from tests.integration.worker_world import (
    EXPECTED,
    HANDOFF,
    PROMPT,
    REQUEST,
    SAMPLING,
    FaultyEngine,
    Mesh,
    in_mesh,
    mixed_run,
    pair,
)


def test_a_handoff_from_reserve_to_release() -> None:
    """The whole life of one request over the bus: the tokens are those of one uninterrupted sequence, all memory is back."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert isinstance(reserved, Reserved)
        assert await mesh.reserve() == reserved
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.first_token == EXPECTED[0]
        assert await mesh.commit(EXPECTED[0]) == Accepted(handoff_id=HANDOFF)
        assert await mesh.commit(EXPECTED[0]) == Accepted(handoff_id=HANDOFF)
        ids, final = await mesh.text()
        assert ids == EXPECTED
        assert (final.finish_reason, final.num_tokens) == (FinishReason.LENGTH, 12)
        taken_over, ended = await mesh.heard.get(), await mesh.heard.get()
        assert isinstance(taken_over, TakenOver)
        assert isinstance(ended, RequestEnded)
        assert ended.num_tokens == 12
        released = await mesh.release("prefill", "prefill-0")
        assert isinstance(released, Released)
        assert released.response_rpc_ms is not None
        assert released.response_rpc_ms >= 0
        for _ in range(2):
            assert await mesh.release("prefill", "prefill-0") == Released(handoff_id=HANDOFF)
            assert await mesh.release("decode", "decode-0") == Released(handoff_id=HANDOFF)
        mesh.assert_empty()
        assert mesh.services["decode-0"].work.num_prefilled_tokens == 0
        assert mesh.services["prefill-0"].work.num_prefilled_tokens == len(PROMPT)
        last = {report.source_rank: report for report in mesh.reports}
        assert sorted(last) == [0, 1]
        for report in last.values():
            assert all(
                part.ranges == (((0, len(PROMPT)),) if part.role in {"key", "value"} else ((0, 1),))
                for part in report.parts
            )

    in_mesh(scenario)


def test_what_it_takes_from_the_first_token_to_its_report_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decode verifies, the digests are made in between; that is no part of the computing."""
    digest = FakeEngine.digest

    async def slow(self: FakeEngine, *args: Any) -> tuple[PartDigest, ...]:
        await self._clock.sleep(0.2)
        return await digest(self, *args)

    monkeypatch.setattr(FakeEngine, "digest", slow)

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        for verify, least_ms, most_ms in ((False, 0.0, 1.0), (True, 200.0, 201.0)):
            handoff = f"r{verify:d}-0"
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            reserved = await mesh.reserve(handoff=handoff)
            assert isinstance(reserved, Reserved)
            assert await mesh.run(reserved, verify=verify) == Accepted(handoff_id=handoff)
            finished = await mesh.heard.get()
            assert isinstance(finished, PrefillFinished)
            assert least_ms <= finished.response_prepare_ms <= most_ms
            assert finished.compute_ms < 200.0

    in_mesh(scenario)


def test_a_mixed_worker_gives_the_same_tokens() -> None:
    """Without a transfer the same request gives the same tokens, and ends by itself."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(MixedService, "mixed-0", tp=2)
        await mesh.send_prompt("mixed", "mixed-0")
        message = mixed_run()
        assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=HANDOFF)
        assert (await mesh.text())[0] == EXPECTED
        assert isinstance(await mesh.heard.get(), RequestEnded)
        mesh.assert_empty()

    in_mesh(scenario)


def test_max_tokens_one_ends_on_prefill() -> None:
    """The first token ends the request: prefill streams it, once, with the end; nothing is left after the releases."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        one = SamplingParams(max_tokens=1, seed=9)
        assert await mesh.run(reserved, sampling=one) == Accepted(handoff_id=HANDOFF)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.finish_reason is FinishReason.LENGTH
        ids, final = await mesh.text()
        assert (ids, final.num_tokens) == (EXPECTED[:1], 1)
        await mesh.release("prefill", "prefill-0")
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_release_before_its_request_is_a_tombstone() -> None:
    """A cancelled handoff whose commands arrive late is refused by every worker, and takes nothing."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        reserved = await mesh.reserve()
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.release("decode", "decode-0")
        await mesh.release("prefill", "prefill-0")
        for answer in (await mesh.reserve(), await mesh.run(reserved), await mesh.commit(5)):
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.CANCELLED
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_cancel_stops_computing_and_keeps_memory_until_the_release() -> None:
    """The hint never frees granted memory; the release does."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.reserve()
        await mesh.bus.publish(subjects.cancel("decode-0", REQUEST), encode(CancelWork(handoff_id=HANDOFF)))
        await mesh.bus.publish(subjects.cancel("decode-0", REQUEST), b"not json")
        await mesh.clock.sleep(1.0)
        decode_worker = mesh.services["decode-0"]
        assert decode_worker.replicas.load.num_free_slots == decode_worker.settings.num_slots - 1
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_memory_that_nobody_releases_comes_back_after_the_deadline() -> None:
    """With a broker that never speaks again, a reservation ends by its own deadline and grace."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.reserve()
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.clock.sleep(60 + 5 + 3)
        mesh.assert_empty()

    in_mesh(scenario)


def test_commands_that_break_a_rule_are_refused_by_name() -> None:
    """Another incarnation, a lower fence, no room, too long, unknown, no link, no prompt, garbage: each says what is wrong."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, num_blocks=8, num_slots=2)

        def code(answer: Any) -> ErrorCode:
            assert isinstance(answer, Refused)
            return answer.error.code

        assert code(await mesh.commit(5)) is ErrorCode.UNKNOWN_HANDOFF
        too_long = SamplingParams(max_tokens=1000, seed=1)
        assert code(await mesh.reserve(too_long)) is ErrorCode.PROMPT_TOO_LONG
        most = SamplingParams(max_tokens=88, seed=1)
        reserved = await mesh.reserve(most)
        assert isinstance(reserved, Reserved)
        assert code(await mesh.run(reserved, incarnation="i-other")) is ErrorCode.INCARNATION_CHANGED
        assert code(await mesh.run(reserved)) is ErrorCode.PROTOCOL
        other = msgspec.structs.replace(reserved.grant, incarnation="i-other")
        assert code(await mesh.run(reserved, grant=other)) is ErrorCode.INCOMPATIBLE_WORKERS
        short = msgspec.structs.replace(reserved.grant, block_ids=(0,))
        assert code(await mesh.run(reserved, grant=short)) is ErrorCode.PROTOCOL
        await mesh.lease.lead(7)
        assert code(await mesh.run(reserved, fence=7)) is ErrorCode.PROTOCOL
        assert code(await mesh.run(reserved, fence=6)) is ErrorCode.STALE_FENCE
        second = ReserveDecode(
            handoff_id="r2-0",
            request_id="r2",
            attempt=0,
            router_id="router-0",
            incarnation="i-decode-0",
            source=WorkerRef(worker_id="prefill-0", incarnation="i-prefill-0"),
            fence=1,
            num_prompt_tokens=16,
            sampling=SAMPLING,
            timeout_ms=60_000,
        )
        assert (
            code(await mesh.ask("decode", "decode-0", WorkerVerb.RESERVE, second, Reserved | Refused))
            is ErrorCode.OVERLOADED
        )
        for garbage in (b"", b"\xff\xfe", b"[]", b'{"type":"run_prefill"}'):
            reply = await mesh.bus.request(subjects.worker_rpc("prefill", "prefill-0", WorkerVerb.RUN), garbage)
            assert code(decode(reply.data, Refused)) is ErrorCode.PROTOCOL
        shown = mesh.services["prefill-0"].metrics.exposition().decode()
        refused = {"incarnation_changed": 1, "incompatible_workers": 1, "stale_fence": 1, "protocol_error": 7}
        for reason, count in refused.items():
            assert f'pdmesh_rpc_handled_seconds_count{{code="{reason}",verb="run"}} {count}.0' in shown
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_step_that_fails_ends_its_requests_with_the_error_and_the_worker_goes_on() -> None:
    """One verdict for all ranks: the client gets a final frame with the error, memory is back, the next request works."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        await mesh.run(reserved)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        engine = mesh.services["decode-0"].replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        engine.failing_steps = 1
        await mesh.commit(EXPECTED[0])
        ids, final = await mesh.text()
        assert ids == EXPECTED[:1]
        assert final.error is not None
        assert final.error.code is ErrorCode.WORKER_FAILED
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.error == final.error
        await mesh.release("prefill", "prefill-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_prefill_that_fails_is_reported_and_keeps_its_memory_until_the_release() -> None:
    """The broker hears of it at once; the granted memory is not touched by the worker's own decision."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        engine = mesh.services["prefill-0"].replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        engine.failing_steps = 1
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.run(await mesh.reserve())
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.error is not None
        assert finished.first_token is None
        await mesh.release("prefill", "prefill-0")
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_memory_with_a_writer_at_work_is_quarantined_until_the_writer_stops() -> None:
    """A release that cannot tell never gives blocks to anybody; asking again ends the quarantine. Answers and log say of which handoff."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.reserve()
        worker = mesh.services["decode-0"]
        engine = worker.replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        engine.writers_left = 2
        in_quarantine = Released(handoff_id=HANDOFF, quarantined=True)
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                assert await mesh.release("decode", "decode-0") == in_quarantine
            assert worker.replicas[0].pool.num_quarantined_blocks == 4
            assert worker.replicas[0].pool.num_free_blocks == worker.settings.num_blocks - 4
            await mesh.clock.sleep(3.0)
        assert await mesh.release("decode", "decode-0") == Released(handoff_id=HANDOFF)
        told = [line for line in lines if line["event"] in {"memory_quarantined", "quarantine_ended"}]
        of = {"handoff_id": HANDOFF, "num_blocks": 4, "slot": 0, "generation": 1}
        assert told == [
            {"event": "memory_quarantined", "log_level": "info", **of},
            {"event": "quarantine_ended", "log_level": "info", **of},
        ]
        mesh.assert_empty()

    in_mesh(scenario)


def test_draining_takes_nothing_new_and_waits_for_what_is_there() -> None:
    """A drain ends when the last handoff has ended; new ones are refused meanwhile."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.reserve()
        drain = mesh.group.create_task(mesh.hosts[1].drain())
        await mesh.clock.sleep(1.0)
        assert not drain.done()
        message = PromptFrame(
            handoff_id="r9-0", index=0, num_frames=1, num_prompt_tokens=1, prompt_hash="", timeout_ms=1, ids_b64=""
        )
        mesh.services["prefill-0"].draining = True
        refused = await mesh.ask("prefill", "prefill-0", WorkerVerb.PROMPT, message)
        assert refused.error.code is ErrorCode.DRAINING
        await mesh.release("decode", "decode-0")
        await drain

    in_mesh(scenario)
