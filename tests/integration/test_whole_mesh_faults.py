"""One request that fails for a reason of its own, in a mesh that goes on: who is told, how soon, and what it leaves behind."""

from __future__ import annotations

import msgspec
import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.fake.tokens import fake_token
from common.worker.core.doubts import MAX_FAILED_IN_A_ROW
from contracts import ids, subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import HandoffState
from contracts.rank import PartPushed, PushOutcome
from contracts.requests import Accepted, DisaggregatedRoute, SamplingParams, SubmitRequest, WorkerRef
from contracts.subjects import BrokerVerb, WorkerVerb
from services.broker.core.handoff import Handoff
from services.router.core.prompt_frames import pack_ids, prompt_frames, prompt_hash
from tests.integration.test_broker_with_workers import ALL, PUSH
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, ROUTER, Mesh, run_mesh

LONG = 300_000
SOON_S = 1.0


def handoff_of(number: int) -> str:
    """The only attempt of a request."""
    return ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)


async def ended(mesh: Mesh, number: int) -> Handoff:
    """A handoff, once it has ended."""
    while (handoff := mesh.broker.handoff(handoff_of(number))) is None or not handoff.terminal:
        await mesh.clock.sleep(0.01)
    return handoff


def test_one_rank_that_cannot_push_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that could not even begin: both sides have their memory back at once, and the next request is served."""
    next_push = FakeEngine.next_push

    async def refused_by_one(self: FakeEngine) -> PartPushed:
        push = await next_push(self)
        if push.handoff_id != handoff_of(1) or push.rank != 1:
            return push
        return msgspec.structs.replace(push, outcome=PushOutcome.FAILED_QUIESCED, reason="it was not taken")

    monkeypatch.setattr(FakeEngine, "next_push", refused_by_one)

    async def scenario(mesh: Mesh) -> None:
        began = mesh.clock.monotonic()
        await mesh.serve(1, mixed=False, cancel_after=None)
        failed = await ended(mesh, 1)
        assert failed.state is HandoffState.FAILED
        assert failed.record.error is not None
        assert failed.record.error.code is ErrorCode.TRANSFER_FAILED
        assert "rank 1" in failed.record.error.message
        await mesh.clock.sleep(0.1)
        mesh.assert_empty()
        assert mesh.clock.monotonic() - began < SOON_S
        await mesh.serve(2, mixed=False, cancel_after=None)
        assert (await ended(mesh, 2)).state is HandoffState.FINISHED

    run_mesh(scenario, {}, PUSH)


def test_a_link_of_which_one_connection_is_dead_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every handoff fails over it, though all other ranks' parts arrive: after some the pair is linked anew, and serves."""
    next_push, unlink = FakeEngine.next_push, FakeEngine.unlink
    unlinked: list[WorkerRef] = []

    async def dead_at_one(self: FakeEngine) -> PartPushed:
        push = await next_push(self)
        if unlinked or push.rank != 1:
            return push
        return msgspec.structs.replace(push, outcome=PushOutcome.FAILED_QUIESCED, reason="the peer does not answer")

    async def noted(self: FakeEngine, peer: WorkerRef) -> None:
        await unlink(self, peer)
        unlinked.append(peer)

    monkeypatch.setattr(FakeEngine, "next_push", dead_at_one)
    monkeypatch.setattr(FakeEngine, "unlink", noted)

    async def scenario(mesh: Mesh) -> None:
        for number in range(1, MAX_FAILED_IN_A_ROW + 1):
            assert unlinked == []
            await mesh.serve(number, mixed=False, cancel_after=None)
            assert (await ended(mesh, number)).state is HandoffState.FAILED
        await mesh.clock.sleep(0.1)
        assert unlinked == [WorkerRef(worker_id="decode-0", incarnation="i-decode-0")]
        await mesh.wait_linked()
        await mesh.serve(9, mixed=False, cancel_after=None)
        assert (await ended(mesh, 9)).state is HandoffState.FINISHED
        await mesh.clock.sleep(SOON_S)
        mesh.assert_empty()

    run_mesh(scenario, {}, PUSH)


def test_pushes_into_memory_that_was_taken_back_cost_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handoffs that decode has given up, as many in a row as they may be: the link is as good as ever."""
    next_push, unlink = FakeEngine.next_push, FakeEngine.unlink
    unlinked: list[WorkerRef] = []

    async def late(self: FakeEngine) -> PartPushed:
        push = await next_push(self)
        if push.handoff_id == handoff_of(9):
            return push
        outcome = PushOutcome.NOT_TRIED if push.layer else PushOutcome.STALE
        return msgspec.structs.replace(push, outcome=outcome, reason="the generation is another")

    async def noted(self: FakeEngine, peer: WorkerRef) -> None:
        await unlink(self, peer)
        unlinked.append(peer)

    monkeypatch.setattr(FakeEngine, "next_push", late)
    monkeypatch.setattr(FakeEngine, "unlink", noted)

    async def scenario(mesh: Mesh) -> None:
        for number in range(1, MAX_FAILED_IN_A_ROW + 2):
            await mesh.serve(number, mixed=False, cancel_after=None)
            assert (await ended(mesh, number)).state is HandoffState.FAILED
        await mesh.serve(9, mixed=False, cancel_after=None)
        assert (await ended(mesh, 9)).state is HandoffState.FINISHED
        assert unlinked == []
        await mesh.clock.sleep(SOON_S)
        mesh.assert_empty()

    run_mesh(scenario, {}, PUSH)


def test_a_push_of_which_nobody_knows_the_end_costs_its_link_and_what_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker that swallows what it is sent: whoever waits for it fails at once, and the pair is linked anew."""
    next_push, unlink = FakeEngine.next_push, FakeEngine.unlink
    unlinked: list[WorkerRef] = []

    async def swallowed(self: FakeEngine) -> PartPushed:
        push = await next_push(self)
        if push.handoff_id != handoff_of(1) or unlinked:
            return push
        return msgspec.structs.replace(push, outcome=PushOutcome.INDETERMINATE, reason="the peer has been silent")

    async def noted(self: FakeEngine, peer: WorkerRef) -> None:
        await unlink(self, peer)
        unlinked.append(peer)

    monkeypatch.setattr(FakeEngine, "next_push", swallowed)
    monkeypatch.setattr(FakeEngine, "unlink", noted)

    async def scenario(mesh: Mesh) -> None:
        async def knocked(_regions: object) -> None:
            await mesh.clock.sleep(0.3)  # meanwhile the second prompt is computed

        monkeypatch.setattr("services.prefill.links.knock", knocked)
        for service in mesh.services:
            for replica in service.replicas:
                replica.engine._step_s = 0.05  # type: ignore[attr-defined]  # of a fake engine
        began = mesh.clock.monotonic()
        await mesh.serve(1, mixed=False, cancel_after=None)
        await mesh.serve(2, mixed=False, cancel_after=None)
        for number in (1, 2):
            failed = await ended(mesh, number)
            assert failed.record.error is not None
            assert failed.record.error.rule.retryable
        assert mesh.clock.monotonic() - began < SOON_S
        await mesh.wait_linked()
        assert unlinked == [WorkerRef(worker_id="decode-0", incarnation="i-decode-0")]
        await mesh.serve(3, mixed=False, cancel_after=None)
        assert (await ended(mesh, 3)).state is HandoffState.FINISHED
        await mesh.clock.sleep(SOON_S)
        mesh.assert_empty()

    run_mesh(scenario, {}, PUSH, everybody={"max_step_tokens": 16, "prefill_chunk_tokens": 16})


def test_what_only_decode_can_refuse_costs_prefill_nothing() -> None:
    """An answer that is too long for decode's memory, which prefill cannot know: nothing is computed, and nothing kept."""

    async def scenario(mesh: Mesh) -> None:
        began = mesh.clock.monotonic()
        await mesh.serve(10, mixed=False, cancel_after=None)
        refused = await ended(mesh, 10)
        assert refused.state is HandoffState.FAILED
        assert refused.record.error is not None
        assert refused.record.error.code in {ErrorCode.PROMPT_TOO_LONG, ErrorCode.CONTEXT_LENGTH}
        assert not refused.record.error.rule.retryable
        await mesh.clock.sleep(0.1)
        mesh.assert_empty()
        assert [len(service.prompts) for service in mesh.services] == [0, 0, 0]
        assert mesh.clock.monotonic() - began < SOON_S
        await mesh.serve(1, mixed=False, cancel_after=None)
        assert (await ended(mesh, 1)).state is HandoffState.FINISHED

    run_mesh(scenario, {}, {"num_blocks": 3})  # 41 tokens and 6 fit, 50 and 6 do not


def test_a_request_that_is_cancelled_in_mid_transfer_ends_as_an_error() -> None:
    """No reason for an end that a client could take for a whole answer."""

    async def scenario(mesh: Mesh) -> None:
        for service in mesh.services:
            for replica in service.replicas:
                replica.engine.reads.read_s.update({0: 0.5, 1: 0.5})  # type: ignore[attr-defined]  # of a fake engine
        await mesh.serve(1, mixed=False, cancel_after=0.3)
        cancelled = await ended(mesh, 1)
        assert cancelled.state is HandoffState.CANCELLED
        await mesh.clock.sleep(SOON_S)  # frames come over the bus
        finals = [frame for frame in mesh.frames[handoff_of(1)] if frame.final]
        assert {frame.finish_reason for frame in finals} == {None}
        assert {frame.error.code for frame in finals if frame.error} == {ErrorCode.CANCELLED}
        assert mesh.text(handoff_of(1)) == []
        await mesh.clock.sleep(SOON_S)
        mesh.assert_empty()

    run_mesh(scenario, {}, ALL)


def test_a_prompt_of_300000_tokens_that_fits_is_served() -> None:
    """It travels in several frames, and is computed in many chunks."""
    packed = pack_ids([5] * LONG)

    async def scenario(mesh: Mesh) -> None:
        handoff = handoff_of(1)
        digest = prompt_hash(packed)
        subject = subjects.worker_rpc("prefill", "prefill-0", WorkerVerb.PROMPT)
        for frame in prompt_frames(packed, handoff_id=handoff, digest=digest, timeout_ms=60_000):
            assert isinstance(await mesh.ask(subject, encode(frame)), Accepted)
        prefill, decode = (WorkerRef(worker_id=name, incarnation=f"i-{name}") for name in ("prefill-0", "decode-0"))
        submit = SubmitRequest(
            handoff_id=handoff,
            request_id=handoff.removesuffix("-0"),
            attempt=0,
            router_id=ROUTER,
            route=DisaggregatedRoute(prefill=prefill, decode=decode),
            num_prompt_tokens=LONG,
            prompt_hash=digest,
            sampling=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, seed=1, temperature=0.0),
            timeout_ms=30_000,
        )
        assert isinstance(await mesh.ask(subjects.broker_rpc(BrokerVerb.SUBMIT), encode(submit)), Accepted)
        assert (await ended(mesh, 1)).state is HandoffState.FINISHED
        assert mesh.text(handoff) == [fake_token(1, LONG + index) for index in range(NUM_OUTPUT_TOKENS)]
        await mesh.clock.sleep(SOON_S)
        mesh.assert_empty()

    run_mesh(scenario, {}, PUSH, everybody={"num_blocks": LONG // 16 + 10})
