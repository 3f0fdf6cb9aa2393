"""Sequences whose keys and values a group of ranks shares, attended to in fp64: by the engine's code, and plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.engine.model.attention import paged_attention, write_paged
from common.engine.model.attention_metadata import AttentionGeometry, AttentionMetadata, SequenceView
from common.engine.model.partial import BinaryLse, Lse, NaturalLse, Partial, merge_partials

DIM = 4
HEADS = 3
"""Query heads of each rank."""


class Float64Device:
    """Attention as the definition says, in fp64. It gives NaN for rows that see nothing, as kernels do."""

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def prepare_process(self) -> None:
        """Nothing to set up."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, Lse]:
        """See `Device.attend`."""
        scores = query @ key.mT * scale
        if mask is not None:
            scores += mask
        return scores.softmax(-1) @ value, NaturalLse(scores.logsumexp(-1))


class BinaryDevice(Float64Device):
    """One whose kernel takes logarithms to the base 2, and says so."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, Lse]:
        """See `Device.attend`."""
        output, lse = super().attend(query, key, value, mask, scale)
        return output, BinaryLse(lse.values / torch.tensor(2.0, dtype=torch.float64).log())


class LyingDevice(BinaryDevice):
    """The planted mistake: logarithms to the base 2 that pass for natural ones."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, Lse]:
        """See `Device.attend`."""
        output, lse = super().attend(query, key, value, mask, scale)
        return output, NaturalLse(lse.values)


@dataclass(kw_only=True)
class ShardedWorld:
    """Sequences of `lengths` tokens, whose blocks `dcp_size` ranks share; their other memory is NaN. One KV head, as in such a group."""

    lengths: Sequence[int]
    dcp_size: int
    block_size: int
    device: Float64Device = field(default_factory=Float64Device)
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.keys = [self._draw(length, DIM) for length in self.lengths]
        self.values = [self._draw(length, DIM) for length in self.lengths]
        counts = [-(-length // (self.block_size * self.dcp_size)) for length in self.lengths]
        num_blocks = sum(counts) + 2
        free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.blocks = [[free.pop() for _ in range(count)] for count in counts]
        everything = self.views([0] * len(self.lengths), self.lengths)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rank in range(self.dcp_size):
            shape = (num_blocks, 1, self.block_size, DIM)
            caches = (
                torch.full(shape, torch.nan, dtype=torch.float64),
                torch.full(shape, torch.nan, dtype=torch.float64),
            )
            key, value = torch.cat(self.keys)[:, None], torch.cat(self.values)[:, None]
            write_paged(*caches, key, value, self.geometry(rank).build(everything))
            self.caches.append(caches)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64) * 3

    def geometry(self, rank: int) -> AttentionGeometry:
        """The geometry of one rank of the group."""
        return AttentionGeometry(
            num_query_heads=HEADS * self.dcp_size,
            num_kv_heads=1,
            block_size=self.block_size,
            dcp_rank=rank,
            dcp_size=self.dcp_size,
        )

    def views(self, starts: Sequence[int], counts: Sequence[int]) -> list[SequenceView]:
        """A step of `counts[i]` tokens of sequence i from `starts[i]` on; sequences with one token have to come first."""
        return [
            SequenceView(block_ids=blocks, start=start, num_tokens=count)
            for blocks, start, count in zip(self.blocks, starts, counts, strict=True)
        ]

    def query(self, counts: Sequence[int]) -> torch.Tensor:
        """Queries of all heads of the group for a step."""
        return self._draw(sum(counts), HEADS * self.dcp_size, DIM)

    def partial(self, rank: int, query: torch.Tensor, metadata: AttentionMetadata) -> Partial:
        """What one rank finds among its keys."""
        return paged_attention(query, *self.caches[rank], metadata, self.device)

    def merged(self, query: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> Partial:
        """What all ranks find together."""
        views = self.views(starts, counts)
        parts = [self.partial(rank, query, self.geometry(rank).build(views)) for rank in range(self.dcp_size)]
        return stack(parts)

    def plain(self, query: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> Partial:
        """The same by the definition, from the keys and values themselves."""
        outputs, lses = [], []
        row = 0
        for keys, values, start, count in zip(self.keys, self.values, starts, counts, strict=True):
            for position in range(start, start + count):
                scores = query[row] @ keys[: position + 1].mT / DIM**0.5
                outputs.append(scores.softmax(-1) @ values[: position + 1])
                lses.append(scores.logsumexp(-1))
                row += 1
        return Partial(torch.stack(outputs), NaturalLse(torch.stack(lses)))


def stack(parts: Sequence[Partial]) -> Partial:
    """Partial results of several ranks, merged."""
    lse = torch.stack([part.lse.values for part in parts])
    return merge_partials(Partial(torch.stack([part.output for part in parts]), NaturalLse(lse)))


def distance(found: Partial, wanted: Partial) -> float:
    """The largest difference of outputs and LSEs; infinite where one is NaN, or infinite by itself."""
    pairs = (found.output, wanted.output), (found.lse.values, wanted.lse.values)
    differences = [torch.where(left == right, 0.0, (left - right).abs()) for left, right in pairs]
    return max(float(each.nan_to_num(torch.inf, torch.inf).max()) for each in differences)
