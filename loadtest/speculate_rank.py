"""One rank with a draft head, in a process of its own: whole steps as a worker asks for them, and passes by themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Final

import torch

from common.engine.device.cpu import CpuDevice
from common.engine.model.attention_metadata import SequenceView, attention_geometry
from common.engine.model.config import load_config
from common.engine.model.full_attention import FullAttention, PagedCache
from common.engine.model.model import Model
from common.engine.model.mtp_head import FIRST_KEY, MtpHead
from common.engine.model.sampler import Draw, Sampler
from common.engine.model.shard import RankShard
from common.engine.model.tensor_parallel import TensorParallel
from common.engine.model.weights import load_mtp_weights, load_weights
from common.engine.ranks.agreement import Agreement
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.cache_shape import cache_shape
from common.engine.ranks.rank import Rank, RankPorts
from common.engine.ranks.step_buffers import StepBuffers, StepSequence
from common.engine.transfer.transports import open_data_plane
from common.layout.region import lay_out
from common.runtime.clock import SystemClock
from contracts.errors import PdmeshError
from contracts.manifest import Coordinates, Dtype
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
from loadtest.speculate_couplings import coupling_of
from loadtest.speculate_times import Coupling, PassTimes, RunTimes, Spent

BLOCK_TOKENS: Final = 16
_MAX_STEP_TOKENS: Final = 512
_SEED: Final = 17
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
        sampling = SamplingParams(max_tokens=num_tokens, seed=_SEED, temperature=temperature, ignore_eos=True)
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
            max_step_tokens=_MAX_STEP_TOKENS,
            max_step_sequences=self._num_sequences,
            drafter=DrafterKind.MTP if depth else DrafterKind.NONE,
            num_speculative_tokens=depth,
            transport_dir=self._directory.name,
        )
        ports = RankPorts(collectives=None, data_plane=open_data_plane(start, _clock), clock=_clock, emit=_hear_nothing)
        return Rank(start, ports)


class Passes:
    """Model and draft head at one depth, over caches of their own."""

    def __init__(self, folder: str, depth: int, num_sequences: int, num_tokens: int) -> None:
        path = Path(folder)
        config = load_config(path)
        shard, device = RankShard(config=config), CpuDevice()
        self._depth = depth
        self._num_blocks = -(-num_tokens // BLOCK_TOKENS)
        shape = cache_shape(
            config,
            dtype=Dtype.FLOAT32,
            block_size=BLOCK_TOKENS,
            num_blocks=self._num_blocks * num_sequences,
            num_slots=num_sequences,
            num_speculative_tokens=depth,
            keeps_draft=depth > 0,
        )
        region = lay_out(shape, Coordinates())
        caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
        weights = load_weights(path, shard, torch.float32)
        self._model = Model(shard, weights, caches, None, device)
        self._choose = Agreement(Sampler(config.eos_token_ids), None).choose
        self._buffers = StepBuffers(
            attention_geometry(shard, BLOCK_TOKENS),
            max_tokens=_MAX_STEP_TOKENS,
            max_sequences=num_sequences,
            device=device.torch_device,
        )
        self._draft_geometry = attention_geometry(shard, BLOCK_TOKENS, first_key=FIRST_KEY)
        self._head: MtpHead | None = None
        if depth:
            ranks = TensorParallel(shard, None)
            self._head = MtpHead(
                load_mtp_weights(path, shard, torch.float32),
                weights,
                PagedCache(caches.draft_key[0], caches.draft_value[0]),
                body=ranks,
                ranks=ranks,
                attention=FullAttention(shard, device, None),
                eps=config.rms_norm_eps,
            )
        self._hidden = torch.randn(num_sequences, config.hidden_size, generator=torch.Generator().manual_seed(_SEED))

    def times(self, batch: int, num_before: int, temperature: float) -> PassTimes:
        """One of each pass, in turn."""
        sampling = SamplingParams(max_tokens=1, seed=_SEED, temperature=temperature)
        decode = _timed(lambda: self._target(batch, num_before, 0, sampling))
        if self._head is None:
            return PassTimes(decode=decode)
        head = self._head
        return PassTimes(
            decode=decode,
            verify=_timed(lambda: self._target(batch, num_before, self._depth, sampling)),
            draft=_timed(lambda: self._draft(head, batch, num_before, sampling)),
        )

    def couplings(self, text: tuple[int, ...], num_before: int, temperature: float) -> tuple[Coupling, ...]:
        """Exact shares from the weights of model and draft behind every token of `text` from `num_before` on.

        The guess at each place is one behind others that were right: the draft's chain is fed the text itself.
        """
        if self._head is None:
            return ()
        self._model.caches.zero_slot(0)
        sequence = StepSequence(
            slot=0, block_ids=self._block_ids(0), start=0, token_ids=text, num_logits=len(text), state_row=0
        )
        output = self._model.forward(self._buffers.fill([sequence]), keep_hidden=True)
        assert output.logits is not None  # noqa: S101 - the one rank is the sampling one
        assert output.hidden is not None  # noqa: S101 - it was asked for
        chosen = torch.softmax(output.logits.double() / temperature, -1)
        guessed: list[list[torch.Tensor]] = [[] for _ in range(self._depth)]
        wanted: list[list[torch.Tensor]] = [[] for _ in range(self._depth)]
        for position in range(len(text) - self._depth):
            hidden = output.hidden[position : position + 1]
            for place in range(self._depth if position + 1 >= num_before else 1):
                at = position + place
                view = SequenceView(block_ids=self._block_ids(0), start=at + FIRST_KEY, num_tokens=1)
                hidden = self._head.forward(
                    hidden,
                    torch.tensor(text[at + 1 : at + 2]),
                    torch.tensor([at]),
                    self._draft_geometry.build([view]),
                )
                logits = self._head.logits(hidden)
                assert logits is not None  # noqa: S101 - as above
                if position + 1 >= num_before:
                    guessed[place].append(torch.softmax(logits[0].double() / temperature, -1))
                    wanted[place].append(chosen[at + 1])
        return tuple(
            coupling_of(torch.stack(one), torch.stack(other)) for one, other in zip(guessed, wanted, strict=True)
        )

    def _block_ids(self, seq: int) -> range:
        return range(seq * self._num_blocks, (seq + 1) * self._num_blocks)

    def _target(self, batch: int, num_before: int, num_drafts: int, sampling: SamplingParams) -> None:
        """A pass over one token of each sequence and `num_drafts` guesses, as a step at this depth runs it."""
        count = 1 + num_drafts
        step = self._buffers.fill(
            [
                StepSequence(
                    slot=seq,
                    block_ids=self._block_ids(seq),
                    start=num_before,
                    token_ids=range(3, 3 + count),
                    num_logits=count,
                    state_row=num_drafts,
                    checkpoints=num_drafts > 0,
                )
                for seq in range(batch)
            ]
        )
        output = self._model.forward(step, keep_hidden=num_drafts > 0)
        self._choose(output.logits, [_draw(sampling, num_before + at) for _ in range(batch) for at in range(count)])

    def _draft(self, head: MtpHead, batch: int, num_before: int, sampling: SamplingParams) -> None:
        """A pass of the head over one pair of each sequence."""
        views = [
            SequenceView(block_ids=self._block_ids(seq), start=num_before + FIRST_KEY, num_tokens=1)
            for seq in range(batch)
        ]
        output = head.forward(
            self._hidden[:batch],
            torch.full((batch,), 3),
            torch.full((batch,), num_before),
            self._draft_geometry.build(views),
        )
        self._choose(head.logits(output), [_draw(sampling, num_before)] * batch)


def _draw(sampling: SamplingParams, position: int) -> Draw:
    return Draw(sampling=sampling, position=position, num_generated=0)


def _timed(work: Callable[[], None]) -> Spent:
    began_ns, began_cpu_ns = _clock.monotonic_ns(), thread_time_ns()
    work()
    cpu_ns = thread_time_ns() - began_cpu_ns
    return Spent(wall_ns=_clock.monotonic_ns() - began_ns, cpu_ns=cpu_ns)


def _check(answer: RankMessage) -> None:
    if not isinstance(answer, Done) or answer.error is not None:
        raise PdmeshError(f"a rank refused: {answer}")


def _hear_nothing(message: RankMessage) -> None:
    """Ranks without peers have nothing to tell beside their answers."""
