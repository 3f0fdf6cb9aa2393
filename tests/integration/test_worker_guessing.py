"""Workers that guess: the same tokens in fewer steps, told as they come, ended where they end, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from common.engine.fake.tokens import fake_accepted
from common.worker.service import WorkerService
from contracts import subjects
from contracts.codec import encode
from contracts.guesses import Guesses
from contracts.handoff import PrefillFinished, Released, RequestEnded, TakenOver
from contracts.rank import StepItem, StepPlan
from contracts.requests import Accepted, CancelWork, FinishReason, SamplingParams, TokenFrame
from contracts.subjects import WorkerVerb
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.worker_world import EXPECTED, HANDOFF, PROMPT, REQUEST, SAMPLING, Mesh, in_mesh, mixed_run

DEPTH = 3
STEP_MS = 2.0
SEED = SAMPLING.seed


def runs(num_tokens: int, depth: int = DEPTH) -> list[int]:
    """How many tokens each step gives behind the first token of all, where every guess that could help is made."""
    found, have = [], 1
    while have < num_tokens:
        num_guesses = min(depth, num_tokens - have - 1)
        found.append(1 + fake_accepted(SEED, len(PROMPT) + have, num_guesses))
        have += found[-1]
    return found


def counted(told: Sequence[int], depth: int = DEPTH, max_tokens: int = 12, *, prompt_steps: int) -> Guesses:
    """What runs of tokens add up to."""
    drafted, accepted, have = [0] * depth, [0] * depth, 1
    for run in told:
        for place in range(min(depth, max_tokens - have - 1)):
            drafted[place] += 1
            accepted[place] += place < run - 1
        have += run
    longest = sum(1 for count in drafted if count)
    return Guesses(
        num_steps=prompt_steps + len(told),
        drafted=tuple(drafted[:longest]),
        accepted=tuple(accepted[:longest]),
        draft_ms=drafted[0] * STEP_MS / 4,
        verify_ms=drafted[0] * STEP_MS * 3 / 4,
    )


async def mixed(mesh: Mesh, sampling: SamplingParams = SAMPLING, **changes: Any) -> WorkerService:
    """A mixed worker that guesses and has been asked to serve the usual prompt."""
    worker = await mesh.add(MixedService, "mixed-0", **({"num_speculative_tokens": DEPTH} | changes))
    await ask(mesh, sampling)
    return worker


async def ask(mesh: Mesh, sampling: SamplingParams) -> None:
    """Let it serve the usual prompt."""
    await mesh.send_prompt("mixed", "mixed-0")
    message = mixed_run(sampling=sampling)
    assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=HANDOFF)


async def frames(mesh: Mesh) -> list[TokenFrame]:
    """All frames up to the last one."""
    found = [await mesh.frames.get()]
    while not found[-1].final:
        found.append(await mesh.frames.get())
    return found


def test_the_tokens_of_a_step_leave_together() -> None:
    """Frames end where steps end; their tokens are those of a worker that guesses nothing, and it says what came of its guesses."""

    async def scenario(mesh: Mesh) -> None:
        with capture_logs() as lines:
            worker = await mixed(mesh)
            told = await frames(mesh)
            ended = await mesh.heard.get()
            await mesh.clock.sleep(0.1)
        steps = runs(12)
        assert max(steps) > 1
        assert [token for frame in told for token in frame.token_ids] == EXPECTED
        ends = {1 + sum(steps[:count]) for count in range(len(steps) + 1)}
        assert {frame.index + len(frame.token_ids) for frame in told} <= ends
        assert len(told[0].token_ids) == 1
        assert isinstance(ended, RequestEnded)
        assert ended.guesses == counted(steps, prompt_steps=1)
        assert ended.guesses is not None
        assert ended.guesses.num_steps + ended.guesses.num_accepted == 12
        (line,) = [line for line in lines if line["event"] == "request_ended"]
        assert (line["num_steps"], line["num_drafted"], line["num_accepted"]) == (
            ended.guesses.num_steps,
            ended.guesses.num_drafted,
            ended.guesses.num_accepted,
        )
        assert line["accepted_at"] == list(ended.guesses.accepted)
        assert (line["draft_ms"], line["verify_ms"]) == (ended.guesses.draft_ms, ended.guesses.verify_ms)
        check_metrics(worker, ended.guesses)
        mesh.assert_empty()

    in_mesh(scenario)


def check_metrics(worker: WorkerService, guesses: Guesses) -> None:
    """The worker's counters say the same of its only request."""
    shown = dict(
        line.rsplit(" ", 1) for line in worker.metrics.exposition().decode().splitlines() if not line.startswith("#")
    )
    for name, counts in (("drafted", guesses.drafted), ("draft_accepted", guesses.accepted)):
        found = [float(shown[f'pdmesh_worker_{name}_total{{position="{place}"}}']) for place in range(1, DEPTH + 1)]
        assert found == [*counts, *[0.0] * (DEPTH - len(counts))]
    num_steps = float(shown["pdmesh_worker_accepted_draft_tokens_count"])
    assert num_steps == guesses.drafted[0] == float(shown["pdmesh_worker_verify_seconds_count"])
    assert float(shown["pdmesh_worker_accepted_draft_tokens_sum"]) == guesses.num_accepted
    assert float(shown["pdmesh_worker_draft_seconds_sum"]) * 1000 == pytest.approx(guesses.draft_ms)
    assert float(shown["pdmesh_worker_verify_seconds_sum"]) * 1000 == pytest.approx(guesses.verify_ms)
    decoded = float(shown["pdmesh_worker_decoded_tokens_total"])
    assert decoded == guesses.num_steps - 1 + guesses.num_drafted


@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize(("min_tokens", "ignore_eos"), [(0, False), (4, False), (12, False), (0, True)])
def test_a_sequence_ends_where_it_ends_also_inside_a_run(index: int, min_tokens: int, *, ignore_eos: bool) -> None:
    """The end of sequence counts behind min_tokens, and not where it is ignored; what was guessed behind it is forgotten."""

    async def scenario(mesh: Mesh) -> None:
        worker = await mesh.add(MixedService, "mixed-0", num_speculative_tokens=DEPTH)
        worker.info = msgspec.structs.replace(worker.info, eos_token_ids=frozenset({EXPECTED[index]}))
        await ask(mesh, msgspec.structs.replace(SAMPLING, min_tokens=min_tokens, ignore_eos=ignore_eos))
        ids, final = await mesh.text()
        stops = [at for at, token in enumerate(EXPECTED) if token == EXPECTED[index] and at + 1 > min_tokens]
        count = 12 if ignore_eos or not stops else stops[0] + 1
        reason = FinishReason.LENGTH if ignore_eos or not stops else FinishReason.STOP
        assert (ids, final.num_tokens, final.finish_reason) == (EXPECTED[:count], count, reason)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert (ended.num_tokens, ended.finish_reason) == (count, reason)
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_more_tokens_come_than_were_asked_for(max_tokens: int) -> None:
    """However they fall into steps, and with as many guesses as a worker can make."""

    async def scenario(mesh: Mesh) -> None:
        await mixed(mesh, msgspec.structs.replace(SAMPLING, max_tokens=max_tokens), num_speculative_tokens=8)
        ids, final = await mesh.text()
        assert (ids, final.finish_reason) == (EXPECTED[:max_tokens], FinishReason.LENGTH)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.guesses == (
            counted(runs(max_tokens, 8), 8, max_tokens, prompt_steps=1) if max_tokens > 2 else None
        )
        mesh.assert_empty()

    in_mesh(scenario)


async def handed_over(mesh: Mesh, *, drafts: bool, **changes: Any) -> tuple[list[StepItem], Guesses | None]:
    """A handoff to a decode worker that guesses: the items of its steps, and what it says of its guesses."""
    await mesh.add(PrefillService, "prefill-0", tp=2, num_speculative_tokens=DEPTH)
    decode = await mesh.add(DecodeService, "decode-0", **({"num_speculative_tokens": DEPTH} | changes))
    await mesh.linked()
    engine: Any = decode.replicas[0].engine
    items: list[StepItem] = []
    step = engine.step

    async def noted(plan: StepPlan) -> Any:
        items.extend(plan.items)
        return await step(plan)

    engine.step = noted
    await mesh.send_prompt("prefill", "prefill-0")
    assert await mesh.run(await mesh.reserve()) == Accepted(handoff_id=HANDOFF)
    finished = await mesh.heard.get()
    assert isinstance(finished, PrefillFinished)
    assert finished.first_token is not None
    await mesh.commit(finished.first_token, drafts=drafts)
    assert (await mesh.text())[0] == EXPECTED
    taken_over, ended = await mesh.heard.get(), await mesh.heard.get()
    assert isinstance(taken_over, TakenOver)
    assert isinstance(ended, RequestEnded)
    await mesh.release("prefill", "prefill-0")
    mesh.assert_empty()
    return items, ended.guesses


def test_behind_a_handoff_the_first_step_guesses_already() -> None:
    """It goes on from the draft that has come; from then on it takes the steps that a mixed worker takes."""

    async def scenario(mesh: Mesh) -> None:
        items, guesses = await handed_over(mesh, drafts=True)
        assert [(item.bootstrap, item.token_ids, item.num_tokens) for item in items[:2]] == [
            (True, (EXPECTED[0],), 1 + DEPTH),
            (False, (), 1 + DEPTH),
        ]
        assert guesses == counted(runs(12), prompt_steps=0)

    in_mesh(scenario)


def test_a_draft_head_without_its_cache_guesses_nothing() -> None:
    """One token a step, whatever the worker's depth: guesses of half a cache would be wrong."""

    async def scenario(mesh: Mesh) -> None:
        items, guesses = await handed_over(mesh, drafts=False)
        assert {(item.bootstrap, item.num_tokens) for item in items} == {(False, 1)}
        assert len(items) == 11
        assert guesses is None

    in_mesh(scenario)


def test_an_n_gram_drafter_needs_no_cache() -> None:
    """It has nothing to be handed over, and guesses from the second step on: the first names its token."""

    async def scenario(mesh: Mesh) -> None:
        items, guesses = await handed_over(mesh, drafts=False, drafter="ngram")
        assert [(item.bootstrap, item.num_tokens) for item in items[:2]] == [(False, 1), (False, 1 + DEPTH)]
        assert guesses is not None

    in_mesh(scenario)


def test_one_that_is_given_up_says_what_came_of_its_guesses() -> None:
    """A client that leaves, or a stop string, ends a request from outside: the counts come with the release."""

    async def scenario(mesh: Mesh) -> None:
        await mixed(mesh, msgspec.structs.replace(SAMPLING, max_tokens=5000))
        await mesh.frames.get()
        while (await mesh.frames.get()).index < 40:
            continue
        await mesh.bus.publish(subjects.cancel("mixed-0", REQUEST), encode(CancelWork(handoff_id=HANDOFF)))
        await mesh.clock.sleep(0.1)
        with capture_logs() as lines:
            released = await mesh.release("mixed", "mixed-0")
            await mesh.release("mixed", "mixed-0")
        assert isinstance(released, Released)
        assert released.guesses is not None
        assert released.guesses.num_steps + released.guesses.num_accepted > 40
        (line,) = [line for line in lines if line["event"] == "request_released"]
        assert (line["num_accepted"], line["accepted_at"]) == (
            released.guesses.num_accepted,
            list(released.guesses.accepted),
        )
        mesh.assert_empty()

    in_mesh(scenario)


def test_guesses_go_on_where_memory_grows_and_is_taken_back() -> None:
    """Two requests in a pool that cannot hold both: one is preempted and computed again, and both get their tokens."""

    async def scenario(mesh: Mesh) -> None:
        worker = await mesh.add(
            MixedService, "mixed-0", num_speculative_tokens=DEPTH, num_blocks=8, num_slots=2, reserve_output_tokens=1
        )
        sampling = msgspec.structs.replace(SAMPLING, max_tokens=40)
        handoffs = ("ra-0", "rb-0")
        for handoff in handoffs:
            await mesh.send_prompt("mixed", "mixed-0", handoff)
            message = mixed_run(handoff_id=handoff, request_id=handoff[:2], sampling=sampling)
            assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=handoff)
        told: dict[str, list[int]] = {handoff: [] for handoff in handoffs}
        num_ended = 0
        while num_ended < len(handoffs):
            frame = await mesh.frames.get()
            assert frame.index == len(told[frame.handoff_id])
            told[frame.handoff_id] += frame.token_ids
            num_ended += frame.final
        assert told["ra-0"] == told["rb-0"]
        assert told["ra-0"][:12] == EXPECTED
        assert len(told["ra-0"]) == 40
        for _ in handoffs:
            await mesh.heard.get()
        assert "pdmesh_worker_preemptions_total 1.0" in worker.metrics.exposition().decode()
        mesh.assert_empty()

    in_mesh(scenario)
