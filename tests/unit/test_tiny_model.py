"""The training model computes what the reference library computes."""

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpLayer

from models.tiny.model import ModelConfig, TinyQwen

SHAPES = [
    ModelConfig(),
    ModelConfig(num_hidden_layers=8, linear_num_value_heads=16, linear_value_head_dim=16, rope_theta=1e4),
]


def make_pair(config: ModelConfig) -> tuple[TinyQwen, Qwen3_5ForCausalLM]:
    """Return the training model with random weights, norms included, and the reference with the same weights."""
    torch.manual_seed(1)
    model = TinyQwen(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                # They start at zero, which would hide everything before them.
                parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5)
        model.model.norm.weight.fill_(0.1)
        model.model.embed_tokens.weight.normal_(std=0.3)
    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config.to_hf())).float().eval()
    missing, unexpected = reference.load_state_dict(model.state_dict(), strict=False)
    assert missing == ["lm_head.weight"]
    assert all(name.startswith("mtp.") for name in unexpected)
    reference.tie_weights()
    return model, reference


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 32, 131])
def test_logits_equal_the_reference(config: ModelConfig, num_tokens: int) -> None:
    """Logits of a whole sequence agree to 1e-3 at a standard deviation of about 4, whatever its length is to the chunk's."""
    model, reference = make_pair(config)
    tokens = torch.randint(config.vocab_size, (2, num_tokens))
    with torch.no_grad():
        expected = reference(tokens).logits
        actual = model.logits(model.hidden(tokens))
    assert expected.std() > 1
    assert (expected - actual).abs().max() < 1e-3


def test_draft_head_equals_the_reference() -> None:
    """The draft head's hidden states agree with the library's MTP layer, given the same hidden states and next tokens."""
    config = ModelConfig()
    model, reference = make_pair(config)
    reference_config = Qwen3_5TextConfig(**config.to_hf(), attn_implementation="sdpa")
    reference_config.layer_types = ["full_attention"]
    layer = MtpLayer(reference_config, type(reference.model.layers[0]), type(reference.model.norm), 0).float().eval()
    names = {
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "post_norm.weight": "norm.weight",
    }
    weights = model.mtp.state_dict()
    layer.load_state_dict(
        {name: weights[names.get(name, name.replace("mtp_block", "layers.0"))] for name in layer.state_dict()}
    )
    tokens = torch.randint(config.vocab_size, (2, 40))
    with torch.no_grad():
        hidden = model.hidden(tokens)[:, :-1]
        embedded = reference.model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(39).expand(2, -1)
        angles = reference.model.rotary_emb(embedded, position_ids=positions)
        expected = layer(
            embedded, hidden, position_embeddings=angles, attention_mask=None, position_ids=positions, cache=None
        )
        actual = model.draft(hidden, tokens[:, 1:])
    assert expected.std() > 0.1
    assert (expected - actual).abs().max() < 1e-4
