"""What one pass of a model and of its draft head costs by itself, and how often its guesses would be right, from the weights."""

from __future__ import annotations

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
from common.engine.ranks.step_buffers import StepBuffers, StepSequence
from common.layout.region import lay_out
from common.runtime.clock import SystemClock
from contracts.manifest import Coordinates, Dtype
from contracts.requests import SamplingParams
from loadtest.speculate_couplings import coupling_of
from loadtest.speculate_times import Coupling, PassTimes, Spent

BLOCK_TOKENS: Final = 16
MAX_STEP_TOKENS: Final = 512
SEED: Final = 17
_clock: Final = SystemClock()


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
            max_tokens=MAX_STEP_TOKENS,
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
        self._hidden = torch.randn(num_sequences, config.hidden_size, generator=torch.Generator().manual_seed(SEED))

    def times(self, batch: int, num_before: int, temperature: float) -> PassTimes:
        """One of each pass, in turn."""
        sampling = SamplingParams(max_tokens=1, seed=SEED, temperature=temperature)
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
