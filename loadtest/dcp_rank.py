"""One rank that decodes behind a long context, with its KV head's blocks shared by ranks and without, in a process of its own."""

from __future__ import annotations

from time import thread_time_ns
from typing import Final

import torch

from common.engine.collectives.passed_fd import PassedFd
from common.engine.collectives.port import Collectives
from common.engine.collectives.shared_memory import SharedMemoryCollectives
from common.engine.device.cpu import CpuDevice
from common.engine.model.attention import paged_attention
from common.engine.model.attention_metadata import SequenceView, attention_geometry
from common.engine.model.config import FULL_ATTENTION
from common.engine.model.context_group import split_context
from common.engine.model.model import Model
from common.engine.model.shard import RankShard
from common.engine.model.weights import FullAttentionWeights, LayerWeights, LinearAttentionWeights, ModelWeights
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.step_buffers import StepBuffers, StepInput, StepSequence
from common.layout.context_parallel import local_length
from common.runtime.clock import SystemClock
from loadtest.dcp_collectives import SimulatedCollectives, Stopwatch, TimedCollectives
from loadtest.dcp_shape import BLOCK_TOKENS, attention_bytes, blocks_for, long_context_model, rank_region
from loadtest.dcp_times import RankPlace, ReadTime, StepTime
from loadtest.statistics import median

_SCALE: Final = 0.05
_PATIENCE_S: Final = 60.0
_TOKEN: Final = 7
_SEED: Final = 11
_clock: Final = SystemClock()


def cache_bytes(dcp: int, num_blocks: int, num_slots: int) -> tuple[int, int]:
    """Bytes of all key and value tensors of a rank with so much memory, and of all tensors of states."""
    region = rank_region(rank=0, tp=dcp, dcp=dcp, num_blocks=num_blocks, num_slots=num_slots)
    caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
    paged, states = (
        sum(tensor.nbytes for held in kinds for tensor in held.values())
        for kinds in ((caches.key, caches.value), (caches.conv, caches.ssm))
    )
    return paged, states


class StepRank:
    """Made with the sizes of groups to compare. The ranks of a group are told the same, in the same order."""

    def __init__(self, place: RankPlace, memory: PassedFd | None, sizes: tuple[int, ...], num_tokens: int) -> None:
        """`num_tokens` is the longest context. `memory` is the group's, unless it is simulated."""
        torch.set_num_threads(1)
        self._stopwatch = Stopwatch(_clock.monotonic_ns, thread_time_ns)
        group: Collectives
        if memory is None:
            group = SimulatedCollectives(place.tp, place.meeting_ns or 0, _clock.monotonic_ns)
        else:
            group = SharedMemoryCollectives.attach(
                memory.fileno(), place.rank, timeout_s=_PATIENCE_S, now=_clock.monotonic
            )
        self._group = TimedCollectives(group, self._stopwatch)
        weights = _weights(RankShard(config=long_context_model(), tp_rank=place.rank, tp_size=place.tp))
        blocks = _blocks(num_tokens)
        self._models = {dcp: ShardedModel(place, dcp, num_tokens, weights, blocks, self._group) for dcp in sizes}

    def sharded(self, dcp: int) -> ShardedModel:
        """The model of groups of `dcp`."""
        return self._models[dcp]

    def meeting_ns(self, count: int) -> int:
        """How long a meeting of the ranks takes: the median of `count`, after one that waits for whoever is late."""
        self._group.barrier()
        times = []
        for _ in range(count):
            began_ns = _clock.monotonic_ns()
            self._group.barrier()
            times.append(_clock.monotonic_ns() - began_ns)
        return round(median(times))

    def logits(self, dcp: int, num_tokens: int) -> tuple[float, ...] | None:
        """What one step behind `num_tokens` tokens gives, from forgotten states; None on ranks that do not sample."""
        model = self._models[dcp]
        model.caches.zero_slot(0)
        found = model.step(num_tokens)
        return None if found is None else tuple(found[0].tolist())

    def steps(self, dcp: int, num_tokens: int, count: int) -> tuple[StepTime, ...]:
        """`count` steps behind `num_tokens` tokens, the inputs of each laid out anew; the first of them warms up and is left out."""
        model, watch = self._models[dcp], self._stopwatch
        found = []
        for _ in range(count + 1):
            self._group.barrier()
            before = watch.spent_ns, watch.spent_cpu_ns, watch.num_calls
            began_ns, began_cpu_ns = _clock.monotonic_ns(), thread_time_ns()
            model.step(num_tokens)
            took = StepTime(
                step_cpu_ns=thread_time_ns() - began_cpu_ns,
                step_ns=_clock.monotonic_ns() - began_ns,
                collective_ns=watch.spent_ns - before[0],
                collective_cpu_ns=watch.spent_cpu_ns - before[1],
                num_collectives=watch.num_calls - before[2],
            )
            found.append(took)
        return tuple(found[1:])

    def reads(self, dcp: int, num_tokens: int, count: int) -> tuple[ReadTime, ...]:
        """Attention alone and a plain pass over the bytes that it must read, in turns, on all ranks at once."""
        found = []
        for _ in range(count + 1):
            self._group.barrier()
            found.append(self._models[dcp].read(num_tokens))
        return tuple(found[1:])

    def cache_bytes(self, dcp: int, num_blocks: int, num_slots: int) -> tuple[int, int]:
        """See the function of this name."""
        return cache_bytes(dcp, num_blocks, num_slots)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class ShardedModel:
    """The model of a rank in a group of `dcp` ranks, with the caches of one sequence."""

    def __init__(  # noqa: PLR0917 - made by `StepRank` alone
        self,
        place: RankPlace,
        dcp: int,
        num_tokens: int,
        weights: ModelWeights,
        blocks: torch.Tensor,
        group: TimedCollectives,
    ) -> None:
        config = long_context_model()
        self._rank, self._dcp = place.rank, dcp
        self._device = CpuDevice()
        num_blocks = blocks_for(num_tokens + 1, dcp)
        region = rank_region(rank=place.rank, tp=place.tp, dcp=dcp, num_blocks=num_blocks)
        self.caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
        for layer in config.full_layers:
            # The same sequence whatever the group: block g lies on rank g % dcp.
            for cache, kind in ((self.caches.key[layer], 0), (self.caches.value[layer], 1)):
                held = blocks[kind, place.rank % dcp :: dcp]
                cache[: len(held)].copy_(held)
        shard = RankShard(config=config, tp_rank=place.rank, tp_size=place.tp, dcp_size=dcp)
        context = split_context(group, dcp)
        self._model = Model(shard, weights, self.caches, group, self._device, context=context)
        self._geometry = attention_geometry(shard, BLOCK_TOKENS)
        self._buffers = StepBuffers(self._geometry, max_tokens=1, max_sequences=1, device=self._device.torch_device)
        self._query = torch.randn(1, shard.num_attending_heads, config.head_dim)

    def step(self, num_tokens: int) -> torch.Tensor | None:
        """One token behind `num_tokens` others; logits on the sampling rank."""
        return self._model.forward(self._input(num_tokens)).logits

    def read(self, num_tokens: int) -> ReadTime:
        """Attention of all layers, then a sum over as many bytes."""
        caches = self.caches
        view = SequenceView(block_ids=self._block_ids(num_tokens), start=num_tokens, num_tokens=1)
        metadata = self._geometry.build((view,))
        held = local_length(num_tokens + 1, BLOCK_TOKENS, self._dcp, self._rank % self._dcp)
        numel = held * long_context_model().head_dim
        began_ns = thread_time_ns()
        for layer in caches.key:
            paged_attention(self._query, caches.key[layer], caches.value[layer], metadata, self._device)
        attended_ns = thread_time_ns()
        for layer in caches.key:
            caches.key[layer].view(-1)[:numel].sum()
            caches.value[layer].view(-1)[:numel].sum()
        return ReadTime(
            attention_cpu_ns=attended_ns - began_ns,
            read_cpu_ns=thread_time_ns() - attended_ns,
            num_bytes=attention_bytes(num_tokens, dcp=self._dcp, rank=self._rank),
        )

    def _block_ids(self, num_tokens: int) -> range:
        return range(blocks_for(num_tokens + 1, self._dcp))

    def _input(self, num_tokens: int) -> StepInput:
        sequence = StepSequence(
            slot=0, block_ids=self._block_ids(num_tokens), start=num_tokens, token_ids=(_TOKEN,), num_logits=1
        )
        return self._buffers.fill((sequence,))


def _blocks(num_tokens: int) -> torch.Tensor:
    """Keys and values of one sequence, `[2, blocks, 1, block size, head dim]`: the same on all ranks, and in all layers."""
    config = long_context_model()
    shape = (2, blocks_for(num_tokens + 1, 1), config.num_key_value_heads, BLOCK_TOKENS, config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))


def _weights(shard: RankShard) -> ModelWeights:
    """Random ones in the shapes of a checkpoint's. What ranks with the same KV head must have alike is drawn alike."""
    config, hidden = shard.config, shard.config.hidden_size
    own = torch.Generator().manual_seed(_SEED + 1 + shard.tp_rank)
    common = torch.Generator().manual_seed(_SEED)

    def drawn(*shape: int, source: torch.Generator = own) -> torch.Tensor:
        return torch.randn(shape, generator=source) * _SCALE

    def mixer(kind: str) -> FullAttentionWeights | LinearAttentionWeights:
        if kind == FULL_ATTENTION:
            queries, keys, dim = len(shard.query_heads), len(shard.kv_heads), config.head_dim
            return FullAttentionWeights(
                in_proj=torch.cat(
                    (
                        drawn(queries * dim, hidden),
                        drawn(2 * keys * dim, hidden, source=common),
                        drawn(queries * dim, hidden),
                    )
                ),
                qk_norm=torch.ones(queries + keys, dim),
                out_proj=drawn(hidden, queries * dim),
            )
        heads = len(shard.linear_value_heads)
        return LinearAttentionWeights(
            in_proj=drawn(shard.conv_channels + shard.value_channels + 2 * heads, hidden),
            conv=drawn(4, shard.conv_channels),
            decay=-torch.ones(heads),
            dt_bias=torch.zeros(heads),
            norm=torch.ones(config.linear_value_head_dim),
            out_proj=drawn(hidden, shard.value_channels),
        )

    embedding = drawn(shard.vocab_size, hidden)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                input_norm=torch.ones(hidden),
                mixer=mixer(kind),
                mlp_norm=torch.ones(hidden),
                gate_up=drawn(2 * len(shard.mlp_rows), hidden),
                down=drawn(hidden, len(shard.mlp_rows)),
            )
            for kind in config.layer_types
        ),
        final_norm=torch.ones(hidden),
        lm_head=embedding,
    )
