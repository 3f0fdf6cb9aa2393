"""The CPU adapter: one torch thread a process, PyTorch's own flash attention."""

from __future__ import annotations

from typing import Final

import torch

from common.engine.model.partial import NaturalLse

_FLASH: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the public function hides the log-sum-exp


class CpuDevice:
    """See `Device`. fp32 arithmetic whatever the cache dtype: a 16-bit output would round the partials of a merge."""

    @property
    def torch_device(self) -> torch.device:
        """See `Device.torch_device`."""
        return torch.device("cpu")

    def prepare_process(self) -> None:
        """One thread: two made models of this size slower, and ranks share the cores."""
        torch.set_num_threads(1)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, NaturalLse]:
        """See `Device.attend`."""
        output, lse = _FLASH(query.float(), key.float(), value.float(), attn_mask=mask, scale=scale)
        return output, NaturalLse(lse)
