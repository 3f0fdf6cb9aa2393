"""Opening checkpoints: both names, one file or several, and every fault at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.engine.model.checkpoint import Checkpoint, CheckpointError, expected_shapes
from common.engine.model.config import ModelConfig, parse_config
from common.engine.model.shard import RankShard
from common.engine.model.weights import FullAttentionWeights, LinearAttentionWeights, load_weights

Tensors = dict[str, torch.Tensor]


RAW = {
    "model_type": "qwen3_5_text",
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
}


def make_config(*, tied: bool = False, num_mtp_layers: int = 0) -> ModelConfig:
    """A model of two layers."""
    return parse_config(RAW | {"tie_word_embeddings": tied, "mtp_num_hidden_layers": num_mtp_layers})


def tensors_of(config: ModelConfig, prefix: str = "model.") -> Tensors:
    """Random tensors of every expected name and shape."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config, prefix).items()}


def store(folder: Path, tensors: Tensors) -> None:
    """Write a checkpoint of one file."""
    save_file(tensors, folder / "model.safetensors")


def fault(folder: Path, config: ModelConfig) -> str:
    """The text of the error that opening gives."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, config)
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_both_prefixes_are_understood_and_the_vision_tower_is_skipped(tmp_path: Path, prefix: str) -> None:
    """Text weights are found under either prefix; tensors of the vision tower are not looked at."""
    config = make_config(num_mtp_layers=1)
    tensors = tensors_of(config, prefix)
    store(tmp_path, tensors | {"model.visual.blocks.0.weight": torch.zeros(1)})
    with Checkpoint(tmp_path, config) as checkpoint:
        assert checkpoint.prefix == prefix
        name = f"{prefix}layers.1.mlp.gate_proj.weight"
        assert torch.equal(checkpoint.read(name, rows=range(3, 6)), tensors[name][3:6])
        assert torch.equal(checkpoint.read(name, columns=range(2, 4)), tensors[name][:, 2:4])
        assert torch.equal(checkpoint.read(name), tensors[name])


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    """Missing, unknown, misshapen and unreadable tensors are each named, in one error."""
    config = make_config()
    tensors = tensors_of(config)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.linear_attn.conv1d.weight"] = torch.zeros(32, 1, 3)
    tensors["model.layers.0.linear_attn.A_log"] = torch.zeros(4, dtype=torch.int32)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(4)
    store(tmp_path, tensors)
    text = fault(tmp_path, config)
    assert "4 faults" in text
    assert "model.norm.weight: missing" in text
    assert "model.layers.0.linear_attn.conv1d.weight: shape [32, 1, 3], expected [32, 1, 4]" in text
    assert "model.layers.0.linear_attn.A_log: dtype I32" in text
    assert "model.layers.1.self_attn.q_proj.bias: not expected" in text


def test_the_draft_head_is_always_validated(tmp_path: Path) -> None:
    """A wrong tensor of the MTP head is refused although nothing reads it; so is a head that the configuration denies."""
    config = make_config(num_mtp_layers=1)
    tensors = tensors_of(config)
    tensors["mtp.fc.weight"] = torch.zeros(8, 8)
    store(tmp_path, tensors)
    assert "mtp.fc.weight: shape [8, 8], expected [8, 16]" in fault(tmp_path, config)
    assert "mtp.norm.weight: not expected" in fault(tmp_path, make_config())


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    """Tensors come from the file that the index names; a lost file or tensor is named."""
    config = make_config()
    tensors = tensors_of(config)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with Checkpoint(tmp_path, config) as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensors[name]) for name in names)
    index["ghost.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "ghost.weight: named by" in fault(tmp_path, config)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors: missing file" in fault(tmp_path, config)


def test_files_that_are_no_checkpoint_are_named(tmp_path: Path) -> None:
    """No file, a broken file and a broken index."""
    config = make_config()
    assert "model.safetensors: missing file" in fault(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    assert "model.safetensors: not a readable safetensors file" in fault(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "model.safetensors.index.json" in fault(tmp_path, config)


def test_a_redundant_head_must_equal_the_embedding(tmp_path: Path) -> None:
    """A tied checkpoint may carry lm_head when it is the embedding; a different one is refused."""
    config = make_config(tied=True)
    tensors = tensors_of(config)
    shard = RankShard(config=config)
    store(tmp_path, tensors)
    weights = load_weights(tmp_path, shard, torch.float32)
    assert weights.lm_head is weights.embedding
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    store(tmp_path, tensors)
    weights = load_weights(tmp_path, shard, torch.float32)
    assert weights.lm_head is weights.embedding
    tensors["lm_head.weight"][30, 7] += 1
    store(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="lm_head"):
        load_weights(tmp_path, shard, torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_together_hold_the_whole_model(tmp_path: Path, tp: int) -> None:
    """Rows and columns of every projection are cut by heads; Q, K and V of a linear layer each on its own."""
    config = make_config()
    tensors = tensors_of(config)
    store(tmp_path, tensors)
    ranks = [load_weights(tmp_path, RankShard(config=config, tp_rank=r, tp_size=tp), torch.float32) for r in range(tp)]
    linear, full = [], []
    for weights in ranks:
        first, second = (layer.mixer for layer in weights.layers)
        assert isinstance(first, LinearAttentionWeights)
        assert isinstance(second, FullAttentionWeights)
        linear.append(first)
        full.append(second)

    name = "model.layers.0.linear_attn."
    cuts = [6 // tp, 6 // tp, 20 // tp, 20 // tp, 4 // tp, 4 // tp]
    parts = zip(*(w.in_proj.split_with_sizes(cuts) for w in linear), strict=True)
    joined = [torch.cat(part) for part in parts]
    assert torch.equal(torch.cat(joined[:3]), tensors[name + "in_proj_qkv.weight"])
    assert torch.equal(joined[3], tensors[name + "in_proj_z.weight"])
    assert torch.equal(joined[4], tensors[name + "in_proj_b.weight"])
    assert torch.equal(joined[5], tensors[name + "in_proj_a.weight"])
    conv = [torch.cat(part, 1) for part in zip(*(w.conv.split_with_sizes(cuts[:3], 1) for w in linear), strict=True)]
    assert torch.equal(torch.cat(conv, 1).T, tensors[name + "conv1d.weight"][:, 0])
    assert torch.equal(torch.cat([w.out_proj for w in linear], 1), tensors[name + "out_proj.weight"])
    assert torch.equal(torch.cat([w.dt_bias for w in linear]), tensors[name + "dt_bias"])
    assert torch.allclose(torch.cat([w.decay for w in linear]), -tensors[name + "A_log"].exp())

    name = "model.layers.1.self_attn."
    cuts = [16 // tp, 8 // tp, 8 // tp, 16 // tp]
    query, key, value, gate = (
        torch.cat(p) for p in zip(*(w.in_proj.split_with_sizes(cuts) for w in full), strict=True)
    )
    stored = tensors[name + "q_proj.weight"].view(4, 2, 4, 8)
    assert torch.equal(query.view(4, 4, 8), stored[:, 0])
    assert torch.equal(gate.view(4, 4, 8), stored[:, 1])
    assert torch.equal(key, tensors[name + "k_proj.weight"])
    assert torch.equal(value, tensors[name + "v_proj.weight"])
    head = torch.cat([w.lm_head for w in ranks])
    assert torch.equal(head[:31], tensors["lm_head.weight"])


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    """31 rows over 2 ranks: 16 each, of which the last one of the last rank is zeros. Weights come in the engine's dtype."""
    config = make_config()
    store(tmp_path, tensors_of(config))
    last = load_weights(tmp_path, RankShard(config=config, tp_rank=1, tp_size=2), torch.bfloat16)
    assert last.lm_head.shape == (16, 8)
    assert not last.lm_head[15].any()
    assert last.lm_head[14].any()
    assert last.embedding.dtype == torch.bfloat16
