"""What the engine asks of a device."""

from __future__ import annotations

from typing import Protocol

import torch

from common.engine.model.partial import Lse


class Device(Protocol):
    """A device adapter: kernels and memory that differ between devices. Stateless; shared by all layers."""

    @property
    def torch_device(self) -> torch.device:
        """Where weights and step buffers live."""
        ...

    def prepare_process(self) -> None:
        """Set up this process for the device, before any tensor is made."""
        ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, Lse]:
        """Attention of one tile of keys: softmax(query key^T * scale + mask) value.

        `query` is `[B, H, R, D]`, `key` and `value` `[B, H, S, D]`, `mask` None or fp32, broadcastable to `[B, 1, R, S]`. Returns
        the fp32 output `[B, H, R, D]` and the fp32 log-sum-exp `[B, H, R]`, of the type that says its base. A row whose mask is all
        -inf gives whatever the kernel gives: the caller clears it.
        """
        ...
