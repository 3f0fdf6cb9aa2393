"""The optimiser makes its updates orthogonal and shares the parameters with AdamW."""

import torch
from torch import nn

from models.tiny.model import ModelConfig, TinyQwen
from models.tiny.muon import Muon, make_optimizers, orthogonal


def test_update_has_singular_values_near_one() -> None:
    """Wide and tall matrices alike end with all singular values between 0.6 and 1.3."""
    torch.manual_seed(1)
    for shape in ((3, 64, 96), (2, 96, 64)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_step_moves_against_the_gradient() -> None:
    """One step lowers a linear loss by the scaled learning rate."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = Muon([weight], learning_rate=0.1)
    weight.grad = torch.eye(64)
    optimizer.step()
    assert -0.1 * 0.2 * 8 * 1.3 < weight.diagonal().mean().item() < -0.1 * 0.2 * 8 * 0.6


def test_every_parameter_has_one_optimizer() -> None:
    """Large matrices go to Muon, the embedding and all else to AdamW, none to both."""
    model = TinyQwen(ModelConfig(num_hidden_layers=4))
    muon, adam = make_optimizers(model, 1e-3)
    by_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    by_adam = {id(parameter) for group in adam.param_groups for parameter in group["params"]}
    assert not by_muon & by_adam
    assert by_muon | by_adam == {id(parameter) for parameter in model.parameters()}
    assert id(model.model.embed_tokens.weight) in by_adam
    assert id(model.mtp.fc.weight) in by_muon
