"""Reading a checkpoint's configuration: both published forms, defaults that are not assumed, faults named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.engine.model.config import load_config, parse_config
from common.engine.model.shard import RankShard
from contracts.errors import InvalidValueError

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "eos_token_id": 3,
}


def test_a_plain_text_configuration_is_read() -> None:
    """Sizes are taken over, and derived facts follow from them."""
    config = parse_config(TEXT)
    assert config.rope_theta == 1e7
    assert config.rotary_dim == 8
    assert config.full_layers == (3, 7)
    assert config.linear_layers == (0, 1, 2, 4, 5, 6)
    assert (config.key_dim, config.value_dim, config.conv_channels) == (64, 192, 320)
    assert config.eos_token_ids == (3,)
    assert not config.tie_word_embeddings
    assert config.num_mtp_layers == 0


def test_a_multimodal_configuration_is_read_through_its_text_part() -> None:
    """`text_config` gives the sizes; what only the outer object says (tying) counts too."""
    nested = {k: v for k, v in TEXT.items() if k != "rope_parameters"}
    nested |= {"rope_theta": 5e5, "mtp_num_hidden_layers": 1, "full_attention_interval": 2}
    config = parse_config({"model_type": "qwen3_5", "text_config": nested, "tie_word_embeddings": True})
    assert config.rope_theta == 5e5
    assert config.partial_rotary_factor == 0.25
    assert config.tie_word_embeddings
    assert config.num_mtp_layers == 1
    assert config.full_layers == (1, 3, 5, 7)


def test_eos_ids_of_configuration_and_generation_are_joined(tmp_path: Path) -> None:
    """Either file may know an end-of-text token that the other does not."""
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    assert load_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load_config(tmp_path).eos_token_ids == (3, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("vocab_size", 0),
        ("hidden_size", "64"),
        ("intermediate_size", None),
        ("num_hidden_layers", True),
        ("num_attention_heads", 7),
        ("linear_num_value_heads", 6),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("inf")),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("linear_conv_kernel_dim", 3),
        ("layer_types", ["full_attention"]),
        ("mtp_num_hidden_layers", 2),
        ("tie_word_embeddings", 1),
        ("eos_token_id", 250),
        ("num_experts", 8),
        ("partial_rotary_factor", 0.1),
    ],
)
def test_a_bad_value_is_named_with_its_rule(field: str, value: object) -> None:
    """The error says which field, which value and which rule."""
    raw: dict[str, Any] = TEXT | {field: value}
    if field == "partial_rotary_factor":
        raw["rope_parameters"] = {"rope_theta": 1e4}
    with pytest.raises(InvalidValueError, match=field) as caught:
        parse_config(raw)
    assert caught.value.value == value
    assert caught.value.rule_text


def test_a_layer_type_that_is_unknown_is_named_with_its_place() -> None:
    """One bad entry among eight is found."""
    kinds = ["linear_attention"] * 7 + ["sliding_attention"]
    with pytest.raises(InvalidValueError, match=r"layer_types\[7\]"):
        parse_config(TEXT | {"layer_types": kinds})


def test_theta_is_never_assumed() -> None:
    """A configuration without rope_theta is refused, not filled in; other kinds of RoPE are refused too."""
    with pytest.raises(InvalidValueError, match="rope_theta"):
        parse_config(TEXT | {"rope_parameters": {"rope_type": "default"}})
    with pytest.raises(InvalidValueError, match="rope_type"):
        parse_config(TEXT | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A missing file, bad JSON and a JSON list are told apart from a bad value."""
    with pytest.raises(InvalidValueError, match=r"config\.json.*readable"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidValueError, match="valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidValueError, match="JSON object"):
        load_config(tmp_path)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_legal_cut_covers_everything_once(tp: int) -> None:
    """Heads, rows and vocabulary of all ranks together are the whole model; KV heads repeat by division."""
    config = parse_config(TEXT)
    shards = [RankShard(config=config, tp_rank=r, tp_size=tp) for r in range(tp)]
    assert [h for s in shards for h in s.query_heads] == list(range(8))
    assert [h for s in shards for h in s.linear_key_heads] == list(range(4))
    assert [h for s in shards for h in s.linear_value_heads] == list(range(8))
    assert [r for s in shards for r in s.mlp_rows] == list(range(96))
    assert [v for s in shards for v in s.vocab_rows] == list(range(250))
    kv = [h for s in shards for h in s.kv_heads]
    assert kv == ([0, 0, 1, 1] if tp == 4 else [0, 1])
    assert all(s.vocab_size * tp >= 250 for s in shards)


@pytest.mark.parametrize(("tp", "rule"), [(0, "1 or more"), (3, "num_attention_heads"), (8, "linear_num_key_heads")])
def test_an_illegal_cut_is_refused_with_the_rule(tp: int, rule: str) -> None:
    """The error names the size that the number of ranks does not divide."""
    with pytest.raises(InvalidValueError, match=rule):
        parse_config(TEXT).check_tensor_parallel(tp)


def test_kv_heads_must_divide_or_be_divided() -> None:
    """Three KV heads on two ranks fit neither way."""
    odd = TEXT | {"num_key_value_heads": 3, "num_attention_heads": 6}
    with pytest.raises(InvalidValueError, match="num_key_value_heads"):
        parse_config(odd).check_tensor_parallel(2)
    with pytest.raises(InvalidValueError, match="tp_rank"):
        RankShard(config=parse_config(TEXT), tp_rank=2, tp_size=2)


def test_context_parallel_ranks_share_a_kv_head() -> None:
    """The group size divides the number of ranks that hold one KV head."""
    config = parse_config(TEXT)
    config.check_context_parallel(4, 2)
    with pytest.raises(InvalidValueError, match=r"dcp: .* 1 where no two ranks hold the same KV head"):
        config.check_context_parallel(2, 2)
    with pytest.raises(InvalidValueError, match=r"dcp: .* divides the 2 ranks that hold one KV head at tp 4"):
        config.check_context_parallel(4, 4)
