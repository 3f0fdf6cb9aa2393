"""The caches of one rank as tensors: views of its one data-plane region, by the region map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from common.layout.region import Cache, RegionMap
from common.layout.shape import LayerType
from contracts.manifest import Dtype, Namespace, Role

TORCH_DTYPES: Final = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


class LayerCaches:
    """The caches of the target model and of its draft head, by layer index.

    `key[i]`, `value[i]`: `[num_blocks, kv_heads, block_size, head_dim]` of full-attention layer i. `conv[i]`:
    `[num_slots, 3 + k, channels]`, and `ssm[i]`: `[num_slots, k + 1, value_heads, dk, dv]` fp32, of linear layer i. The state
    of a sequence is in rows 0 to 2 of conv and row 0 of ssm, unless speculation moved it. `draft_key[i]` and `draft_value[i]` are
    those of layer i of the draft head; `bootstrap` `[num_slots, hidden]` is what it goes on from, None without such a head.
    """

    def __init__(self, region_map: RegionMap, memory: memoryview) -> None:
        self.region_map = region_map
        self.draft_key: dict[int, torch.Tensor] = {}
        self.draft_value: dict[int, torch.Tensor] = {}
        self.bootstrap: torch.Tensor | None = None
        self.key: dict[int, torch.Tensor] = {}
        self.value: dict[int, torch.Tensor] = {}
        self.conv: dict[int, torch.Tensor] = {}
        self.ssm: dict[int, torch.Tensor] = {}
        for layer, kind in enumerate(region_map.shape.layer_types):
            match kind:
                case LayerType.FULL:
                    self.key[layer] = _view(memory, region_map.cache(Role.KEY, layer))
                    self.value[layer] = _view(memory, region_map.cache(Role.VALUE, layer))
                case LayerType.LINEAR:
                    self.conv[layer] = _view(memory, region_map.cache(Role.CONV, layer))
                    self.ssm[layer] = _view(memory, region_map.cache(Role.SSM, layer))

        for layer in range(region_map.shape.num_draft_layers):
            self.draft_key[layer] = _view(memory, region_map.cache(Role.KEY, layer, Namespace.DRAFT))
            self.draft_value[layer] = _view(memory, region_map.cache(Role.VALUE, layer, Namespace.DRAFT))
        if self.draft_key:
            self.bootstrap = _view(memory, region_map.cache(Role.BOOTSTRAP, 0, Namespace.DRAFT)).squeeze(1)

    def zero_slot(self, slot: int) -> None:
        """Forget what the slot's last sequence left: every conv column, every state row of every linear layer, the bootstrap."""
        for caches in (self.conv, self.ssm):
            for cache in caches.values():
                cache[slot].zero_()
        if self.bootstrap is not None:
            self.bootstrap[slot].zero_()


def _view(memory: memoryview, cache: Cache) -> torch.Tensor:
    dtype = TORCH_DTYPES[cache.dtype]
    count = cache.nbytes // cache.dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=cache.offset)
    return flat.view(*cache.shape)


def state_view(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
    """The consecutive `rows` of `states` (dim 0) as a view to update in place, or None when they are not consecutive."""
    first = rows[0]
    if all(row == first + i for i, row in enumerate(rows)):
        return states.narrow(0, first, len(rows))
    return None
