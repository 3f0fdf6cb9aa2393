"""Root mean square norm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 and cast back to the dtype of `x`.

    `weight` is what multiplies (a checkpoint's w plus 1, for all norms but the gated delta net's), fp32.
    """
    if x.dtype == torch.float32:
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
    return torch.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
