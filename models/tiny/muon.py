"""Muon: momentum whose update is made orthogonal, for the weight matrices; AdamW takes every other parameter."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_ROUNDS = 5
# Newton-Schulz coefficients that pull singular values of (0, 1] near 1 within five rounds (Jordan et al. 2024, "Muon").
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the matrices `[n, rows, columns]` with all singular values moved close to 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.transpose(1, 2)
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    out: Tensor = x.transpose(1, 2) if tall else x
    return out


class Muon(torch.optim.Optimizer):
    """Scaled so that its steps are as large as AdamW's: one learning rate serves both (Liu et al. 2025, "Muon is scalable")."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float) -> None:
        super().__init__(parameters, {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # no closure, so no loss to return
        """Apply one update; closures are refused with a ValueError."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            # Matrices of one shape share the Newton-Schulz rounds: fewer, larger products.
            shapes: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append((parameter, self._wanted(parameter, parameter.grad)))
            for shape, pairs in shapes.items():
                scale = 0.2 * max(shape) ** 0.5
                updates = orthogonal(torch.stack([wanted for _, wanted in pairs]))
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _wanted(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the gradient with Nesterov momentum."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(state["momentum"], _MOMENTUM)


def make_optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Split the parameters: matrices with both sides of 64 or more go to Muon, but the embedding, like all others, to AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and min(parameter.shape) >= 64 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, learning_rate=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
