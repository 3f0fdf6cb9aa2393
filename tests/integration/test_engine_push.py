"""Prefill on one engine, decode on another: what is pushed, when, into what, and what planted faults do to it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.dataplane import shm_remote
from common.dataplane.copier import copy_group
from common.engine.port import EngineError
from common.engine.transfer.push_lane import MAX_BATCHED
from contracts.handoff import Grant
from contracts.manifest import Role
from contracts.rank import PushOutcome, PushTarget, StepItem, StepPlan
from tests.integration.engine_world import binding
from tests.integration.push_pair import DECODER, PAGED, Pair, hand_over


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)])
async def test_decode_continues_with_the_reference_tokens(reference: Any, tmp_path: Path, tps: tuple[int, int]) -> None:
    """Two prompts of several chunks, prefilled in one batch, go to other blocks, slots and numbers of ranks: same 64 tokens.

    Every token of every part is pushed exactly once, and full blocks leave before the prompt has ended.
    """
    prompts = [reference.prompts[2].token_ids, reference.prompts[3].token_ids]
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, tps)
        outputs = await hand_over(pair, prompts)
        assert outputs == [prompt.output_ids for prompt in reference.prompts[2:]]
        for seq, prompt in enumerate(prompts):
            for part in pair.parts:
                reports = pair.of(seq, part)
                expected = len(prompt) if part.role in PAGED else 1
                assert sum(report.end - report.start for report in reports) == expected
                assert all(report.queued_ns <= report.started_ns <= report.done_ns for report in reports)
                assert all(report.num_bytes > 0 for report in reports)
                if part.role in PAGED:
                    assert reports[0].end == 48, "the full blocks of the first chunk of 60 tokens"


async def test_processes_hand_over_through_shared_memory(reference: Any, tmp_path: Path) -> None:
    """The same with real rank processes, two to one."""
    prompts = [reference.prompts[1].token_ids]
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (2, 1), real=True)
        assert await hand_over(pair, prompts, 16) == [reference.prompts[1].output_ids[:16]]


async def test_layers_leave_while_later_layers_are_computed(reference: Any, tmp_path: Path) -> None:
    """A layer's content is handed to the pusher when the layer has written it, not when the step ends."""
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (1, 1))
        prompt = reference.prompts[1].token_ids
        await pair.bind(0, len(prompt))
        item = StepItem(seq=0, start=0, num_tokens=len(prompt), token_ids=prompt, sample=True, last_chunk=True)
        result = await pair.prefill.step(StepPlan(step=0, items=(item,)))
        await pair.collect([len(prompt)])
        (layers,) = result.layer_started_ns
        assert len(layers) == 4
        ends = (*layers[1:], result.ended_ns)
        for report in pair.reports:
            assert layers[report.layer] <= report.queued_ns <= ends[report.layer]


async def test_a_push_into_memory_that_was_taken_back_fails_and_changes_nothing(reference: Any, tmp_path: Path) -> None:
    """The grant's generation is gone: each rank's first part is reported as stale, the others as not tried, and the next owner's tokens are right."""
    prompt = reference.prompts[1].token_ids
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (2, 1))
        await pair.bind(0, len(prompt))
        assert await pair.decode.release((0,), 90, 1000) == frozenset()
        there = tuple(range(100, 125))
        await pair.decode.bind(binding(7, len(prompt), block_ids=there, slot=5, generation=91))
        items = (StepItem(seq=7, start=0, num_tokens=len(prompt), token_ids=prompt, sample=True, last_chunk=True),)
        tokens = list((await pair.decode.step(StepPlan(step=0, items=items))).tokens)
        await pair.compute([prompt])
        async with asyncio.timeout(30):
            while len({(r.rank, r.role, r.layer, r.destination_rank) for r in pair.reports}) < len(pair.parts):
                pair.reports.append(await pair.prefill.next_push())
        found = [(report.rank, report.outcome) for report in pair.reports]
        assert {outcome for _, outcome in found} == {PushOutcome.STALE, PushOutcome.NOT_TRIED}
        assert {rank for rank, outcome in found if outcome is PushOutcome.STALE} == {0, 1}
        for step in range(1, 12):
            items = (StepItem(seq=7, start=len(prompt) + step - 1, num_tokens=1, sample=True),)
            tokens += (await pair.decode.step(StepPlan(step=step, items=items))).tokens
        assert tuple(token.token_id for token in tokens) == reference.prompts[1].output_ids[:12]


@pytest.mark.parametrize(
    "failpoints",
    ["zero:role=ssm", "zero:role=conv,layer=1", "zero:role=key,block=2", "swap:role=value,block=0,with=1"],
)
async def test_a_planted_fault_shows_in_the_tokens(reference: Any, tmp_path: Path, failpoints: str) -> None:
    """Zeroed states and misplaced blocks give other tokens: the comparison with the reference can fail."""
    prompts = [reference.prompts[1].token_ids]
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (2, 1), failpoints=failpoints)
        assert await hand_over(pair, prompts) != [reference.prompts[1].output_ids]


async def test_delayed_parts_arrive_and_dropped_ones_never_do(reference: Any, tmp_path: Path) -> None:
    """A delay changes nothing but time; a dropped part is not reported, and no other part is missing."""
    prompt = reference.prompts[0].token_ids
    async with AsyncExitStack() as stack:
        failpoints = "delay:role=conv,ms=5; drop:role=ssm,layer=2,source=0"
        pair = await Pair.make(stack, reference.folder, tmp_path, (2, 1), failpoints=failpoints)
        await pair.bind(0, len(prompt))
        await pair.compute([prompt])
        await pair.collect([len(prompt)], missing=1)
        (lost,) = [part for part in pair.parts if not pair.ranges(0, part).ranges]
        assert (lost.role, lost.layer, lost.src_rank) == (Role.SSM, 2, 0)


async def test_memory_that_is_still_being_read_is_not_given_back(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releasing a source whose push is under way leaves the sequence indeterminate, and bound; queued pushes are dropped.

    Once the push has ended, the same release gives everything back.
    """
    entered, gate = threading.Event(), threading.Event()

    def held(*arguments: Any, **named: Any) -> int:
        entered.set()
        assert gate.wait(60)
        return copy_group(*arguments, **named)

    monkeypatch.setattr(shm_remote, "copy_group", held)
    prompt = reference.prompts[1].token_ids
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (1, 1))
        stack.callback(gate.set)
        await pair.bind(0, len(prompt))
        await pair.compute([prompt])
        assert entered.is_set()
        assert await pair.prefill.release((0,), 90, 0) == {0}
        (scan,) = await pair.prefill.scan()
        assert scan.seqs == (0,)
        # At least the two roles of the layer that is being written; as many as a batch holds if the writer began late.
        assert 2 <= scan.num_queued_pushes <= MAX_BATCHED
        gate.set()
        assert await pair.prefill.release((0,), 91, 30_000) == frozenset()
        (scan,) = await pair.prefill.scan()
        assert (scan.seqs, scan.num_queued_pushes) == ((), 0)


async def test_a_delayed_part_holds_up_no_other_and_goes_with_its_sequence(reference: Any, tmp_path: Path) -> None:
    """With one role delayed for minutes every other part arrives; releasing the sequence forgets what has not left."""
    prompt = reference.prompts[1].token_ids
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (1, 1), failpoints="delay:role=conv,ms=600000")
        late = sum(part.role is Role.CONV for part in pair.parts)
        await pair.bind(0, len(prompt))
        await pair.compute([prompt])
        await pair.collect([len(prompt)], missing=late)
        (scan,) = await pair.prefill.scan()
        assert scan.num_queued_pushes == late
        assert await pair.prefill.release((0,), 90, 30_000) == frozenset()
        (scan,) = await pair.prefill.scan()
        assert (scan.seqs, scan.num_queued_pushes) == ((), 0)


async def test_what_waits_in_the_queue_leaves_in_one_write(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a write is under way the rest of the prompt queues up; it follows in one write, reported part by part in turn."""
    gate = threading.Event()
    num_writes = 0
    write = shm_remote.ShmRemoteRegion.write

    def held(*arguments: Any, **named: Any) -> Any:
        nonlocal num_writes
        num_writes += 1
        assert gate.wait(60)
        return write(*arguments, **named)

    monkeypatch.setattr(shm_remote.ShmRemoteRegion, "write", held)
    prompt = reference.prompts[1].token_ids
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (1, 1))
        stack.callback(gate.set)
        await pair.bind(0, len(prompt))
        item = StepItem(seq=0, start=0, num_tokens=len(prompt), token_ids=prompt, sample=True, last_chunk=True)
        first = await pair.prefill.step(StepPlan(step=0, items=(item,)))
        gate.set()
        await pair.collect([len(prompt)])
        assert num_writes == 2
        assert len(pair.reports) == len(pair.parts)
        batch = pair.reports[2:]
        assert all(left.done_ns <= right.started_ns for left, right in pairwise(batch)), "time is shared out by bytes"
        assert batch[0].started_ns < batch[-1].done_ns
        tokens = {token.seq: token.token_id for token in first.tokens}
        assert await pair.continue_on_decode([prompt], tokens, 8) == [reference.prompts[1].output_ids[:8]]


async def test_links_are_needed_and_can_be_taken_away(reference: Any, tmp_path: Path) -> None:
    """A grant of a worker that is not linked is refused at bind; linking again works; a pair that does not fit is refused."""
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, (2, 1))
        await pair.prefill.unlink(DECODER)
        await pair.prefill.unlink(DECODER)
        with pytest.raises(EngineError, match="linked"):
            await pair.bind(0, 5)
        assert [scan.seqs for scan in await pair.prefill.scan()] == [(), ()]
        await pair.decode.release((0,), 95, 1000)
        with pytest.raises(EngineError):
            await pair.prefill.link(DECODER, pair.descriptions() * 2)
        await pair.prefill.link(DECODER, pair.descriptions())
        prompt = reference.prompts[0].token_ids
        there = tuple(range(10))
        await pair.decode.bind(binding(8, 5, block_ids=there, slot=1, generation=96))
        grant = Grant(worker_id="d", incarnation="j1", generation=96, block_ids=there, slot=1)
        await pair.prefill.bind(binding(0, 5, push=PushTarget(grant=grant, num_cached_tokens=0)))
        await pair.compute([prompt])
        await pair.collect([5])
