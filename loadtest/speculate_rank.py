"""One rank with a draft head, in a process of its own: whole steps as a worker asks for them."""

from __future__ import annotations

import tempfile
from time import thread_time_ns
from typing import Final

import torch

from common.engine.ranks.rank import Rank, RankPorts
from common.engine.transfer.transports import open_data_plane
from common.runtime.clock import SystemClock
from contracts.errors import PdmeshError
from contracts.rank import (
    BindSequence,
    Done,
    DrafterKind,
    RankMessage,
    ReleaseSequences,
    StartRank,
    StepDone,
    StepItem,
    StepPlan,
)
from contracts.requests import SamplingParams
from loadtest.speculate_passes import BLOCK_TOKENS, MAX_STEP_TOKENS, SEED, Passes
from loadtest.speculate_times import Coupling, PassTimes, RunTimes, Spent

_RELEASE_MS: Final = 5_000
_clock: Final = SystemClock()


class SpeculatingRanks:
    """A rank for each of `depths`, of the checkpoint in `folder`, with room for `num_sequences` of `num_tokens` each."""

    def __init__(self, folder: str, depths: tuple[int, ...], num_sequences: int, num_tokens: int) -> None:
        torch.set_num_threads(1)
        self._num_blocks = -(-num_tokens // BLOCK_TOKENS)
        self._num_sequences = num_sequences
        self._directory = tempfile.TemporaryDirectory(prefix="pdmesh-loadtest-")
        self._ranks = {depth: self._rank(folder, depth) for depth in depths}
        self._passes = {depth: Passes(folder, depth, num_sequences, num_tokens) for depth in depths}
        self._generation = 0
        self._step = 0

    def run(self, depth: int, prompts: tuple[tuple[int, ...], ...], num_tokens: int, temperature: float) -> RunTimes:
        """Generate behind `prompts`, side by side, until one of them has `num_tokens`; prompts are not counted."""
        rank = self._ranks[depth]
        self._generation += 1
        sampling = SamplingParams(max_tokens=num_tokens, seed=SEED, temperature=temperature, ignore_eos=True)
        texts: list[list[int]] = []
        for seq, prompt in enumerate(prompts):
            binding = BindSequence(
                seq=seq,
                handoff_id=f"s{seq}",
                generation=self._generation,
                block_ids=tuple(range(seq * self._num_blocks, (seq + 1) * self._num_blocks)),
                slot=seq,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
            )
            _check(rank.handle(binding))
            item = StepItem(seq=seq, start=0, num_tokens=len(prompt), token_ids=prompt, sample=True, last_chunk=True)
            texts.append([token.token_id for token in self._run_step(rank, (item,)).tokens])
        num_offered, num_right = [0] * depth, [0] * depth
        first_step = self._step
        began_ns, began_cpu_ns = _clock.monotonic_ns(), thread_time_ns()
        while max(map(len, texts)) < num_tokens:
            items = tuple(
                StepItem(seq=seq, start=len(prompts[seq]) + len(text) - 1, num_tokens=1 + depth, sample=True)
                for seq, text in enumerate(texts)
            )
            before = [len(text) for text in texts]
            done = self._run_step(rank, items)
            for token in done.tokens:
                texts[token.seq].append(token.token_id)
            for seq, num_drafts in enumerate(done.num_drafts):
                for place in range(num_drafts):
                    num_offered[place] += 1
                    num_right[place] += len(texts[seq]) - before[seq] > place + 1
        spent = Spent(wall_ns=_clock.monotonic_ns() - began_ns, cpu_ns=thread_time_ns() - began_cpu_ns)
        self._generation += 1
        released = rank.handle(
            ReleaseSequences(seqs=tuple(range(len(prompts))), generation=self._generation, timeout_ms=_RELEASE_MS)
        )
        _check(released)
        num_steps = self._step - first_step
        return RunTimes(
            spent=spent,
            num_steps=num_steps,
            num_turns=num_steps * len(prompts),
            num_tokens=sum(map(len, texts)) - len(texts),
            num_offered=tuple(num_offered),
            num_right=tuple(num_right),
            texts=tuple(map(tuple, texts)),
        )

    def passes(self, depth: int, batch: int, num_before: int, temperature: float, count: int) -> tuple[PassTimes, ...]:
        """`count` times what each pass of `batch` sequences costs behind `num_before` tokens; the first, a warm-up, left out."""
        passes = self._passes[depth]
        return tuple(passes.times(batch, num_before, temperature) for _ in range(count + 1))[1:]

    def couplings(self, depth: int, text: tuple[int, ...], num_before: int, temperature: float) -> tuple[Coupling, ...]:
        """How often guesses of `text[num_before:]` are right by each way of drawing, by their place: see `Passes.couplings`."""
        return self._passes[depth].couplings(text, num_before, temperature)

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks.values():
            rank.close()
        self._directory.cleanup()

    def _run_step(self, rank: Rank, items: tuple[StepItem, ...]) -> StepDone:
        self._step += 1
        done = rank.handle(StepPlan(step=self._step, items=items))
        if not isinstance(done, StepDone) or done.error is not None:
            raise PdmeshError(f"a step failed: {done}")
        return done

    def _rank(self, folder: str, depth: int) -> Rank:
        start = StartRank(
            worker_id=f"depth-{depth}",
            incarnation="i1",
            rank=0,
            tp=1,
            model_dir=folder,
            block_size=BLOCK_TOKENS,
            num_blocks=self._num_blocks * self._num_sequences,
            num_slots=self._num_sequences,
            max_step_tokens=MAX_STEP_TOKENS,
            max_step_sequences=self._num_sequences,
            drafter=DrafterKind.MTP if depth else DrafterKind.NONE,
            num_speculative_tokens=depth,
            transport_dir=self._directory.name,
        )
        ports = RankPorts(collectives=None, data_plane=open_data_plane(start, _clock), clock=_clock, emit=_hear_nothing)
        return Rank(start, ports)


def _check(answer: RankMessage) -> None:
    if not isinstance(answer, Done) or answer.error is not None:
        raise PdmeshError(f"a rank refused: {answer}")


def _hear_nothing(message: RankMessage) -> None:
    """Ranks without peers have nothing to tell beside their answers."""
