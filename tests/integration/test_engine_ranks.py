"""Ranks behind the engine port: the same tokens for every number of ranks, in threads and in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.engine.port import Engine, EngineDeadError, EngineError
from common.engine.ranks.group import RankGroup
from common.engine.ranks.launch import ProcessLauncher
from contracts.rank import CollectivesKind, DrafterKind, StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.engine_world import binding, engine, generate, starts, thread_launcher


@pytest.mark.parametrize("tp", [1, 2, 4])
async def test_any_number_of_ranks_gives_the_reference_tokens(reference: Any, tmp_path: Path, tp: int) -> None:
    """64 greedy tokens of every prompt, with the vocabulary, all heads and both states cut over 1, 2 and 4 ranks."""
    prompts = [prompt.token_ids for prompt in reference.prompts]
    async with engine(starts(reference.folder, tmp_path, tp), thread_launcher(tp)) as (group, info):
        assert info.vocab_size == 250
        assert info.eos_token_ids == {1, 2}
        assert [rank.manifest.coordinates.tp_rank for rank in info.ranks] == list(range(tp))
        outputs = await generate(group, prompts)
    assert outputs == [prompt.output_ids for prompt in reference.prompts]


async def test_rank_processes_give_the_reference_tokens(reference: Any, tmp_path: Path) -> None:
    """Two processes with collectives over shared memory, started, used, scanned and stopped."""
    prompts = [prompt.token_ids for prompt in reference.prompts]
    async with engine(starts(reference.folder, tmp_path, 2), ProcessLauncher()) as (group, info):
        assert len({rank.pid for rank in info.ranks}) == 2
        outputs = await generate(group, prompts)
        scans = await group.scan()
        assert [scan.seqs for scan in scans] == [(0, 1, 2, 3)] * 2
        assert await group.release((0, 1, 2, 3, 77), 50, 1000) == frozenset()
        assert [scan.seqs for scan in await group.scan()] == [()] * 2
    assert outputs == [prompt.output_ids for prompt in reference.prompts]


async def test_gloo_ranks_give_the_reference_tokens(reference: Any, tmp_path: Path) -> None:
    """Two processes that find each other through a file beside the transport's sockets."""
    messages = starts(reference.folder, tmp_path, 2, collectives=CollectivesKind.GLOO)
    async with engine(messages, ProcessLauncher()) as (group, _):
        prompt = reference.prompts[0]
        assert (await generate(group, [prompt.token_ids])) == [prompt.output_ids]


async def test_a_command_that_is_refused_leaves_the_engine_as_it_was(reference: Any, tmp_path: Path) -> None:
    """Double bindings, foreign slots and blocks, and steps that make no sense are errors with the rule; the engine goes on."""
    async with engine(starts(reference.folder, tmp_path, 2), thread_launcher(2)) as (group, _):
        await group.bind(binding(0, 4))

        async def refused(call: Any, rule: str) -> None:
            with pytest.raises(EngineError, match=rule):
                await call

        await refused(group.bind(binding(0, 4)), "not bound already")
        await refused(group.bind(binding(1, 4, slot=0)), "not held by sequence 0")
        await refused(group.bind(binding(1, 4, slot=6)), "slot: 6")
        await refused(group.bind(binding(1, 4, block_ids=(27, 28))), "none held by sequence 0")
        await refused(group.bind(binding(1, 4, block_ids=(128,))), "different ids from 0 to 127")

        def item(**changes: Any) -> StepPlan:
            values: dict[str, Any] = {"seq": 0, "start": 0, "num_tokens": 1, "token_ids": (5,)} | changes
            return StepPlan(step=1, items=(StepItem(**values),))

        await refused(group.step(item(seq=9)), "a bound sequence")
        await refused(group.step(item(token_ids=())), "last sampled token")
        await refused(group.step(item(num_tokens=2)), "1 token ids given")
        await refused(group.step(item(token_ids=(250,))), "vocab_size")
        await refused(group.step(item(start=28 * 16)), "blocks of a sequence")
        await refused(group.step(StepPlan(step=1, items=())), "tokens of a step")
        result = await group.step(item(sample=True))
        assert len(result.tokens) == 1
        assert [scan.seqs for scan in await group.scan()] == [(0,)] * 2


async def test_bad_starts_are_refused_with_their_reason(reference: Any, tmp_path: Path) -> None:
    """An illegal cut, an unknown dtype and a checkpoint that is not there: the error of the ranks reaches the caller."""

    async def refusal(tp: int, **changes: Any) -> str:
        group = RankGroup(starts(reference.folder, tmp_path, tp, **changes), thread_launcher(tp))
        with pytest.raises(EngineError) as caught:
            await group.start()
        with pytest.raises(EngineDeadError):
            await group.scan()
        return str(caught.value)

    assert "divides num_attention_heads (4)" in await refusal(3)
    assert "dtype: 'int8'" in await refusal(1, dtype="int8")
    assert "device: 'abacus'" in await refusal(1, device="abacus")
    assert "num_speculative_tokens: 2" in await refusal(1, num_speculative_tokens=2)
    assert "drafter: 'mtp'" in await refusal(1, drafter=DrafterKind.MTP)
    assert "transport: 'pigeon'" in await refusal(2, transport="pigeon")


async def read_progress(group: Engine) -> None:
    """Read what the start has told, and then wait for the end."""
    while True:
        await group.next_progress()


def name_of(pid: int) -> str:
    """The name of a process, as `top` shows it."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()


async def test_a_rank_that_dies_fails_the_engine_loudly(reference: Any, tmp_path: Path) -> None:
    """Killing one process ends every waiting and every later call with an error, and `stop` still works."""
    async with engine(starts(reference.folder, tmp_path, 2), ProcessLauncher()) as (group, _):
        await group.bind(binding(0, 4))
        pid = group._manifests[1].pid
        assert name_of(pid) == "pdmesh-rank-1"
        group._handles[1].kill()
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {pid}\) was killed by signal 9 \(SIGKILL\)"):
            await group.next_push()
        with pytest.raises(EngineDeadError, match="rank 1"):
            await read_progress(group)
        with pytest.raises(EngineDeadError):
            await group.scan()


async def test_tokens_are_the_same_sampled_alone_or_together(reference: Any, tmp_path: Path) -> None:
    """Seeded sampling depends on seed and position, not on the batch or on the number of ranks."""
    prompt = reference.prompts[0].token_ids
    sampling = SamplingParams(max_tokens=8, seed=11, temperature=0.8, top_p=0.9, top_k=20)

    async def sample(tp: int, seqs: Sequence[int]) -> list[int]:
        async with engine(starts(reference.folder, tmp_path, tp), thread_launcher(tp)) as (group, _):
            chosen: list[int] = []
            for seq in seqs:
                await group.bind(binding(seq, len(prompt), sampling=sampling))
            start = 0
            tokens: tuple[int, ...] = prompt
            for step in range(8):
                items = [
                    StepItem(seq=seq, start=start, num_tokens=max(1, len(tokens)), token_ids=tokens, sample=True)
                    for seq in seqs
                ]
                result = await group.step(StepPlan(step=step, items=tuple(items)))
                assert len({token.token_id for token in result.tokens}) == 1
                chosen.append(result.tokens[0].token_id)
                start += max(1, len(tokens))
                tokens = ()
            return chosen

    alone = await sample(1, [2])
    assert await sample(1, [0, 1, 3]) == alone
    assert await sample(2, [2, 1]) == alone


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, int], None]:
    """Make a method of one rank fail: plant(target, name, rank)."""

    def plant(target: str, name: str, rank: int) -> None:
        import importlib
        import threading

        module, _, cls = target.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
        original = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == f"rank-{rank}":
                raise RuntimeError("planted")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, faulty)

    return plant


async def test_one_rank_that_cannot_run_a_step_fails_it_on_all(
    reference: Any, tmp_path: Path, planted: Callable[[str, str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure before the first collective is one verdict: nobody hangs, and the next step works."""
    async with engine(starts(reference.folder, tmp_path, 2), thread_launcher(2)) as (group, _):
        await group.bind(binding(0, 4))
        plan = StepPlan(step=0, items=(StepItem(seq=0, start=0, num_tokens=2, token_ids=(5, 6), sample=True),))
        planted("common.engine.ranks.step_buffers.StepBuffers", "fill", 1)
        with pytest.raises(EngineError, match=r"ranks \[1\] cannot run"):
            await group.step(plan)
        monkeypatch.undo()
        assert len((await group.step(plan)).tokens) == 1


async def test_a_sampling_failure_is_everybodys(
    reference: Any, tmp_path: Path, planted: Callable[[str, str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampling rank tells the others that there is no token; the engine goes on."""
    async with engine(starts(reference.folder, tmp_path, 2), thread_launcher(2)) as (group, _):
        await group.bind(binding(0, 4))
        plan = StepPlan(step=0, items=(StepItem(seq=0, start=0, num_tokens=2, token_ids=(5, 6), sample=True),))
        planted("common.engine.model.sampler.Sampler", "sample", 0)
        with pytest.raises(EngineError, match="planted"):
            await group.step(plan)
        monkeypatch.undo()
        await group.bind(binding(1, 4))


async def test_a_failure_inside_the_model_ends_the_engine(
    reference: Any, tmp_path: Path, planted: Callable[[str, str, int], None]
) -> None:
    """Once one rank has left the collectives of a step, the ranks cannot agree any more: the engine is dead, at once."""
    async with engine(starts(reference.folder, tmp_path, 2), thread_launcher(2)) as (group, _):
        await group.bind(binding(0, 4))
        plan = StepPlan(step=0, items=(StepItem(seq=0, start=0, num_tokens=2, token_ids=(5, 6), sample=True),))
        planted("common.engine.model.linear_attention.LinearAttention", "mix", 1)
        with pytest.raises(EngineDeadError, match="planted"):
            await group.step(plan)
        with pytest.raises(EngineDeadError):
            await group.bind(binding(1, 4))


async def test_a_bind_that_fails_on_one_rank_is_undone_on_the_others(
    reference: Any, tmp_path: Path, planted: Callable[[str, str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank holds a sequence that another does not."""
    async with engine(starts(reference.folder, tmp_path, 2), thread_launcher(2)) as (group, _):
        planted("common.engine.ranks.cache.LayerCaches", "zero_slot", 1)
        with pytest.raises(EngineError, match="on 1 of 2 ranks"):
            await group.bind(binding(0, 4))
        monkeypatch.undo()
        assert [scan.seqs for scan in await group.scan()] == [(), ()]
        await group.bind(binding(0, 4))


async def test_stop_is_idempotent_and_cancelling_a_start_leaves_nothing(reference: Any, tmp_path: Path) -> None:
    """A start that is cut short ends its ranks; stopping twice, or before a start, is fine."""
    group = RankGroup(starts(reference.folder, tmp_path, 2), thread_launcher(2))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await group.start()
    await group.stop()
    await group.stop()
    never = RankGroup(starts(reference.folder, tmp_path, 1), thread_launcher(1))
    await never.stop()
