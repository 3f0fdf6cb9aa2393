"""Workers that set aside less than an answer may need: who gives way, what its client sees, and that all memory comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from common.bus.storage import EVENTS_CONFIG
from common.engine.fake.tokens import fake_token
from common.runtime.clock import SystemClock
from common.worker.replica import StartedEngine
from common.worker.settings import PulledRoles, WorkerSettings
from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import PartsAnswer, QueryParts
from contracts.pull import Transfer
from contracts.requests import FinishReason, Refused, SamplingParams
from contracts.subjects import WorkerVerb
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.engine_world import engine, starts, thread_launcher
from tests.integration.preemption_world import AGAIN, OLDER, YOUNGER, Outcome, run_mixed, run_pair
from tests.integration.stored_reference import load_reference
from tests.integration.worker_world import PROMPT, Mesh, in_mesh, pair

NUM_TOKENS = 60
LIMITS: dict[str, Any] = {"num_blocks": 10, "reserve_output_tokens": 1}
"""A prompt takes 3 blocks and grows to 7: two begin together, and do not end together."""
SAMPLING = {
    handoff: SamplingParams(max_tokens=NUM_TOKENS, seed=seed, temperature=0.0)
    for handoff, seed in ((OLDER, 9), (YOUNGER, 10))
}
EXPECTED = {
    handoff: [fake_token(params.seed, len(PROMPT) + index) for index in range(NUM_TOKENS)]
    for handoff, params in SAMPLING.items()
}
SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
STORED = {handoff: load_reference("tiny").prompts[number] for handoff, number in ((OLDER, 19), (YOUNGER, 14))}
"""Prompts of 160 and 65 tokens: 11 and 5 blocks at first, 14 and 9 with the 64 tokens of their output."""
REAL: dict[str, Any] = {"num_blocks": 19, "num_slots": 4}


def assert_both_whole(outcome: Outcome, expected: dict[str, list[int]]) -> None:
    """Nobody has noticed anything: all tokens, each once, whoever gave way."""
    for handoff, tokens in expected.items():
        told = outcome.told[handoff]
        assert told.tokens == tokens
        assert told.final is not None
        assert (told.final.finish_reason, told.final.error, told.final.num_tokens) == (
            FinishReason.LENGTH,
            None,
            len(tokens),
        )
        for event in (EventName.PREFILL_STARTED, EventName.PREFILL_FINISHED):
            assert outcome.count(event, handoff) == 1
    assert outcome.count(EventName.PREEMPTED, OLDER) == 0
    assert outcome.count(EventName.PREEMPTED, YOUNGER) == outcome.num_preemptions > 0
    prompt = outcome.ended[YOUNGER].prompt
    assert prompt is not None
    assert prompt.compute_ms > 0


def assert_younger_ended(outcome: Outcome, expected: dict[str, list[int]]) -> list[int]:
    """The older one is whole; the younger ended for its router to send it again, behind the tokens that are returned."""
    assert outcome.told[OLDER].tokens == expected[OLDER]
    younger = outcome.told[YOUNGER]
    assert younger.final is not None
    assert younger.final.error is not None
    assert (younger.final.error.code, younger.final.error.rule.retryable) == (ErrorCode.PREEMPTED, True)
    assert 1 < len(younger.tokens) == younger.final.num_tokens < len(expected[YOUNGER])
    assert younger.tokens == expected[YOUNGER][: len(younger.tokens)]
    ended = outcome.ended[YOUNGER]
    assert (ended.error, ended.num_tokens) == (younger.final.error, len(younger.tokens))
    assert (outcome.num_preemptions, outcome.count(EventName.PREEMPTED, YOUNGER)) == (1, 1)
    return younger.tokens


async def go_on(mesh: Mesh, params: SamplingParams, delivered: list[int]) -> Outcome:
    """Send the younger one again, as its router does."""
    mesh.prompts[AGAIN] = (*mesh.prompt(YOUNGER)[0], *delivered)
    left = SamplingParams(
        max_tokens=params.max_tokens - len(delivered),
        seed=params.seed,
        temperature=0.0,
        ignore_eos=params.ignore_eos,
    )
    return await run_pair(mesh, {AGAIN: left}, num_delivered_tokens=len(delivered))


async def parts_asked(mesh: Mesh, handoff: str) -> Any:
    """What decode says when it is asked for the parts of a handoff."""
    return await mesh.ask("decode", "decode-0", WorkerVerb.PARTS, QueryParts(handoff_id=handoff), PartsAnswer | Refused)


@pytest.mark.parametrize("writers_left", [0, 2])
def test_a_mixed_worker_computes_again_what_gave_way(writers_left: int) -> None:
    """In place, even when its memory comes back late: the stream has a pause, and nothing else."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        worker = await mesh.add(MixedService, "mixed-0", **LIMITS)
        worker.replicas[0].engine.writers_left = writers_left  # type: ignore[attr-defined]  # of the faulty engine
        outcome = await run_mixed(mesh, SAMPLING)
        assert_both_whole(outcome, EXPECTED)
        mesh.assert_empty()

    in_mesh(scenario)


def test_nobody_gives_way_where_everything_is_set_aside() -> None:
    """The default: the second waits until the first has ended."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        await mesh.add(MixedService, "mixed-0", num_blocks=LIMITS["num_blocks"])
        outcome = await run_mixed(mesh, SAMPLING)
        assert {handoff: told.tokens for handoff, told in outcome.told.items()} == EXPECTED
        assert (outcome.num_preemptions, outcome.count(EventName.PREEMPTED, YOUNGER)) == (0, 0)
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("writers_left", [0, 1])
def test_a_decode_worker_ends_what_gives_way_and_another_attempt_goes_on_behind_it(writers_left: int) -> None:
    """The youngest ends with `preempted`, its memory goes to the older one; nobody waits for the bus or a broker."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        await pair(mesh, **LIMITS)
        mesh.services["decode-0"].replicas[0].engine.writers_left = writers_left  # type: ignore[attr-defined]
        delivered = assert_younger_ended(await run_pair(mesh, SAMPLING), EXPECTED)
        outcome = await go_on(mesh, SAMPLING[YOUNGER], delivered)
        assert delivered + outcome.told[AGAIN].tokens == EXPECTED[YOUNGER]
        await mesh.clock.sleep(2)  # until somebody has looked after what was in quarantine
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("pull", PulledRoles)
def test_who_gives_way_after_a_takeover_by_pull_is_not_pulled_again(pull: PulledRoles) -> None:
    """Its prefill worker has let go: the attempt ends, and another one has a prefill, a staging row and a pull of its own."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        await pair(mesh, transfer=Transfer.PULL, pull=pull, num_staging_rows=2, **LIMITS)
        outcome = await run_pair(mesh, SAMPLING)
        delivered = assert_younger_ended(outcome, EXPECTED)
        assert outcome.pulls == [OLDER, YOUNGER]
        assert (await parts_asked(mesh, YOUNGER)).error.code is ErrorCode.UNKNOWN_HANDOFF
        again = await go_on(mesh, SAMPLING[YOUNGER], delivered)
        assert again.pulls == [AGAIN]
        assert delivered + again.told[AGAIN].tokens == EXPECTED[YOUNGER]
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_preempted_sequence_that_is_cancelled_does_not_come_back() -> None:
    """While it waits for memory, and while its memory is in quarantine."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        worker = await mesh.add(MixedService, "mixed-0", **LIMITS)
        running = mesh.group.create_task(run_mixed(mesh, SAMPLING))
        while (younger := worker.table.get(YOUNGER)) is None or not younger.num_preemptions:
            await mesh.clock.sleep(0.001)
        assert worker.replicas.load.num_waiting == 1
        await mesh.release("mixed", "mixed-0", YOUNGER)
        while worker.table.get(OLDER) is not None:
            await mesh.clock.sleep(0.01)
        running.cancel()
        assert worker.replicas.load.num_waiting == worker.replicas.load.num_running == 0
        mesh.assert_empty()

    in_mesh(scenario)


async def real_mesh(
    sockets: Path, workers: dict[type[Any], tuple[int, dict[str, Any]]], scenario: Callable[[Mesh], Awaitable[None]]
) -> None:
    """Run a scenario on workers of thread ranks with the shipped model, each of so many ranks, and with its own settings."""
    async with asyncio.timeout(120), AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        mesh = Mesh(group, SystemClock())
        mesh.prompts = {handoff: prompt.token_ids for handoff, prompt in STORED.items()}
        tasks = asyncio.all_tasks()
        await mesh.open()
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        for kind, (tp, changes) in workers.items():
            name = f"{kind.role}-0"
            sizes = {key: value for key, value in changes.items() if key.startswith("num_")}
            messages = starts(SHIPPED, sockets, tp, worker_id=name, incarnation=f"i-{name}", **sizes)
            ranks, info = await stack.enter_async_context(engine(messages, thread_launcher(tp)))
            settings = WorkerSettings(
                worker_id=name, model=SHIPPED, tp=tp, max_step_tokens=64, prefill_chunk_tokens=48, **changes
            )
            await mesh.host(kind, settings, (StartedEngine(engine=ranks, info=info),))
        await scenario(mesh)
        for host in mesh.hosts:
            await host.drain()
            await host.close()
        mesh.assert_empty()
        for task in asyncio.all_tasks() - tasks:
            task.cancel()


REAL_SAMPLING = {
    handoff: SamplingParams(max_tokens=len(prompt.output_ids), seed=1, temperature=0.0, ignore_eos=True)
    for handoff, prompt in STORED.items()
}
REAL_EXPECTED = {handoff: list(prompt.output_ids) for handoff, prompt in STORED.items()}


async def test_real_ranks_of_a_mixed_worker_give_the_reference_whoever_gave_way(tmp_path: Path) -> None:
    """Two ranks, prompts in chunks: what was computed again is what was there before."""

    async def scenario(mesh: Mesh) -> None:
        assert_both_whole(await run_mixed(mesh, REAL_SAMPLING), REAL_EXPECTED)

    await real_mesh(tmp_path, {MixedService: (2, {**REAL, "reserve_output_tokens": 1})}, scenario)


async def test_real_ranks_of_a_decode_worker_grow_and_an_ended_answer_goes_on_in_another_attempt(
    tmp_path: Path,
) -> None:
    """What was pushed into the granted blocks stays where it is while more come; the later attempt gives the rest."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.linked()
        delivered = assert_younger_ended(await run_pair(mesh, REAL_SAMPLING), REAL_EXPECTED)
        outcome = await go_on(mesh, REAL_SAMPLING[YOUNGER], delivered)
        assert delivered + outcome.told[AGAIN].tokens == REAL_EXPECTED[YOUNGER]

    workers = {
        PrefillService: (1, {"num_blocks": 64, "num_slots": 4}),
        DecodeService: (2, {**REAL, "reserve_output_tokens": 1}),
    }
    await real_mesh(tmp_path, workers, scenario)
