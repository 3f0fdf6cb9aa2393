"""What a Qwen3.5 checkpoint says about itself, checked before anything else is read. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from contracts.errors import InvalidValueError

FULL_ATTENTION: Final = "full_attention"
LINEAR_ATTENTION: Final = "linear_attention"
CONV_KERNEL: Final = 4
TEXT_MODEL_TYPES: Final = ("qwen3_5_text", "qwen3_5")
MOE_FIELDS: Final = ("num_experts", "num_local_experts")
_DEFAULT_INTERVAL: Final = 4


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The dense Qwen3.5 model of one checkpoint. Sizes are of the whole model, before tensor parallelism."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[str, ...]
    rope_theta: float
    partial_rotary_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers, full and linear attention together."""
        return len(self.layer_types)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a paged KV cache."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL_ATTENTION)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a conv state and a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Channels of Q, and of K, of a linear layer (Kd)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of V of a linear layer (Vd)."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a linear layer's convolution: Q, K and V."""
        return 2 * self.key_dim + self.value_dim

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise `InvalidValueError` unless the model can be cut into `tp` ranks."""
        if tp < 1:
            raise InvalidValueError(field="tp", value=tp, rule="1 or more")
        for name in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size"):
            size = getattr(self, name)
            if size % tp:
                raise InvalidValueError(field="tp", value=tp, rule=f"divides {name} ({size})")
        heads = self.num_key_value_heads
        if heads % tp and tp % heads:
            rule = f"divides num_key_value_heads ({heads}) or is a multiple of it"
            raise InvalidValueError(field="tp", value=tp, rule=rule)

    def check_context_parallel(self, tp: int, dcp: int) -> None:
        """Raise `InvalidValueError` unless `dcp` ranks out of `tp` hold the same KV head."""
        replicas = max(1, tp // self.num_key_value_heads)
        if dcp < 1 or replicas % dcp:
            rule = f"divides the {replicas} ranks that hold one KV head at tp {tp}"
            if replicas == 1:
                rule = "must be 1 where no two ranks hold the same KV head"
            raise InvalidValueError(field="dcp", value=dcp, rule=rule)


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and the eos ids of `generation_config.json`, when there is one) of a checkpoint folder.

    Accepts a plain text configuration and the multimodal one that nests it as `text_config`. Raises `InvalidValueError`
    that names field, value and rule.
    """
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw, generation_eos=eos)


def parse_config(raw: dict[str, Any], *, generation_eos: Any = None) -> ModelConfig:
    """Build the configuration from the object of a `config.json`."""
    text = raw
    if "text_config" in raw:
        text = raw["text_config"]
        if not isinstance(text, dict):
            raise InvalidValueError(field="text_config", value=text, rule="an object")
    model_type = text.get("model_type", raw.get("model_type"))
    for name in MOE_FIELDS:
        if text.get(name):
            raise InvalidValueError(field=name, value=text[name], rule="absent: only dense Qwen3.5 is supported")
    if model_type not in TEXT_MODEL_TYPES:
        raise InvalidValueError(field="model_type", value=model_type, rule=f"one of {', '.join(TEXT_MODEL_TYPES)}")
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("attn_output_gate", True),
        ("linear_conv_kernel_dim", CONV_KERNEL),
        ("mtp_use_dedicated_embeddings", False),
    ):
        if text.get(name, wanted) != wanted:
            raise InvalidValueError(field=name, value=text[name], rule=f"{wanted!r}")
    theta, partial = _rope(text)
    config = ModelConfig(
        vocab_size=_positive(text, "vocab_size"),
        hidden_size=_positive(text, "hidden_size"),
        intermediate_size=_positive(text, "intermediate_size"),
        num_attention_heads=_positive(text, "num_attention_heads"),
        num_key_value_heads=_positive(text, "num_key_value_heads"),
        head_dim=_positive(text, "head_dim"),
        linear_num_key_heads=_positive(text, "linear_num_key_heads"),
        linear_num_value_heads=_positive(text, "linear_num_value_heads"),
        linear_key_head_dim=_positive(text, "linear_key_head_dim"),
        linear_value_head_dim=_positive(text, "linear_value_head_dim"),
        layer_types=_layer_types(text),
        rope_theta=theta,
        partial_rotary_factor=partial,
        rms_norm_eps=_positive_float(text, "rms_norm_eps"),
        max_position_embeddings=_positive(text, "max_position_embeddings"),
        tie_word_embeddings=_flag(raw, text, "tie_word_embeddings"),
        num_mtp_layers=_mtp_layers(text),
        eos_token_ids=(),
    )
    _check_sizes(config)
    eos = _eos_ids(text, raw, generation_eos, config.vocab_size)
    return msgspec.structs.replace(config, eos_token_ids=eos)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InvalidValueError(field=path.name, value=str(path), rule=f"a readable file ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValueError(field=path.name, value=str(path), rule=f"valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidValueError(field=path.name, value=value, rule="a JSON object")
    return value


def _positive(text: dict[str, Any], name: str) -> int:
    value = text.get(name)
    if type(value) is not int or value < 1:
        raise InvalidValueError(field=name, value=value, rule="an integer of 1 or more")
    return value


def _positive_float(text: dict[str, Any], name: str) -> float:
    value = text.get(name)
    if type(value) not in {int, float} or not 0 < float(value or 0) < float("inf"):
        raise InvalidValueError(field=name, value=value, rule="a finite number above 0")
    return float(value or 0)


def _flag(raw: dict[str, Any], text: dict[str, Any], name: str) -> bool:
    value = text.get(name, raw.get(name, False))
    if type(value) is not bool:
        raise InvalidValueError(field=name, value=value, rule="true or false")
    return value


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    num_layers = _positive(text, "num_hidden_layers")
    listed = text.get("layer_types")
    if listed is None:
        interval = _positive({"full_attention_interval": _DEFAULT_INTERVAL, **text}, "full_attention_interval")
        return tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise InvalidValueError(
            field="layer_types", value=listed, rule=f"a list of num_hidden_layers ({num_layers}) names"
        )
    for i, kind in enumerate(listed):
        if kind not in {FULL_ATTENTION, LINEAR_ATTENTION}:
            rule = f"{FULL_ATTENTION} or {LINEAR_ATTENTION}"
            raise InvalidValueError(field=f"layer_types[{i}]", value=kind, rule=rule)
    return tuple(listed)


def _rope(text: dict[str, Any]) -> tuple[float, float]:
    """Theta and the turned share of a head. Theta is never assumed: the library's default is not the models' value."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InvalidValueError(field="rope_parameters", value=rope, rule="an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InvalidValueError(field="rope_parameters.rope_type", value=kind, rule="'default'")
    source = rope if "rope_theta" in rope else text
    theta = _positive_float(source, "rope_theta")
    source = rope if "partial_rotary_factor" in rope else text
    partial = _positive_float({"partial_rotary_factor": 0.25, **source}, "partial_rotary_factor")
    if partial > 1:
        raise InvalidValueError(field="partial_rotary_factor", value=partial, rule="above 0, at most 1")
    return theta, partial


def _mtp_layers(text: dict[str, Any]) -> int:
    value = text.get("mtp_num_hidden_layers", 0)
    if type(value) is not int or value not in {0, 1}:
        raise InvalidValueError(field="mtp_num_hidden_layers", value=value, rule="0 or 1")
    return value


def _check_sizes(config: ModelConfig) -> None:
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, many) % getattr(config, few):
            rule = f"a multiple of {few} ({getattr(config, few)})"
            raise InvalidValueError(field=many, value=getattr(config, many), rule=rule)
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        rule = f"turns an even number of the {config.head_dim} dims of a head"
        raise InvalidValueError(field="partial_rotary_factor", value=config.partial_rotary_factor, rule=rule)


def _eos_ids(text: dict[str, Any], raw: dict[str, Any], generation: Any, vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (text.get("eos_token_id"), raw.get("eos_token_id"), generation):
        ids = source if isinstance(source, list) else [] if source is None else [source]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                rule = f"token ids from 0 to vocab_size - 1 ({vocab_size - 1})"
                raise InvalidValueError(field="eos_token_id", value=token, rule=rule)
            found.add(token)
    return tuple(sorted(found))
