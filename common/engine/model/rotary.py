"""Rotary position embedding over the leading dims of a head, half-split inside them."""

from __future__ import annotations

import torch

from common.engine.model.config import ModelConfig


class Rotary:
    """Turns heads by their positions: inv_freq_i = theta^(-2i/r) for the first r dims of a head."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.dim = config.rotary_dim
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        self.inv_freq = 1.0 / (config.rope_theta**exponents)

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of the first half turned, of `positions [T]`: each `[T, 1, r]`. Once a step."""
        angles = positions.float()[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)

    def apply_(self, heads: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Turn `heads [T, H, head_dim]` in place: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
        cos, sin = table
        turned = heads[..., : self.dim]
        half = self.dim // 2
        swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
        turned.mul_(cos).addcmul_(swapped, sin)
