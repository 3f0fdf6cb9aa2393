"""A safetensors checkpoint: which tensors it must have, and lazy reads of parts of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import torch
from safetensors import safe_open

from common.engine.model.config import FULL_ATTENTION, ModelConfig
from contracts.errors import PdmeshError

if TYPE_CHECKING:
    from types import TracebackType

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
NESTED_PREFIX: Final = "model.language_model."
PLAIN_PREFIX: Final = "model."
VISION_PREFIXES: Final = ("model.visual.", "visual.")
LM_HEAD: Final = "lm_head.weight"
READABLE_DTYPES: Final = ("F32", "BF16", "F16")

Shapes = dict[str, tuple[int, ...]]


class CheckpointError(PdmeshError):
    """The checkpoint is not what its configuration says. The text lists every fault at once, each by tensor name."""


def _layer_shapes(config: ModelConfig, prefix: str, *, full: bool) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }
    if full:
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return shapes | {
            f"{prefix}self_attn.q_proj.weight": (2 * queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (config.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (config.head_dim,),
        }
    channels, values, heads = config.conv_channels, config.value_dim, config.linear_num_value_heads
    return shapes | {
        f"{prefix}linear_attn.in_proj_qkv.weight": (channels, hidden),
        f"{prefix}linear_attn.in_proj_z.weight": (values, hidden),
        f"{prefix}linear_attn.in_proj_b.weight": (heads, hidden),
        f"{prefix}linear_attn.in_proj_a.weight": (heads, hidden),
        f"{prefix}linear_attn.conv1d.weight": (channels, 1, 4),
        f"{prefix}linear_attn.A_log": (heads,),
        f"{prefix}linear_attn.dt_bias": (heads,),
        f"{prefix}linear_attn.norm.weight": (config.linear_value_head_dim,),
        f"{prefix}linear_attn.out_proj.weight": (hidden, values),
    }


def expected_shapes(config: ModelConfig, prefix: str) -> Shapes:
    """Name and shape of every tensor that a checkpoint of `config` must have; text weights begin with `prefix`."""
    hidden = config.hidden_size
    shapes: Shapes = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, hidden),
        f"{prefix}norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for i, kind in enumerate(config.layer_types):
        shapes |= _layer_shapes(config, f"{prefix}layers.{i}.", full=kind == FULL_ATTENTION)
    if config.num_mtp_layers:
        shapes |= {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
            "mtp.norm.weight": (hidden,),
        }
        shapes |= _layer_shapes(config, "mtp.layers.0.", full=True)
    return shapes


class Checkpoint:
    """An opened and checked checkpoint folder. Use it as a context manager: reads are lazy, the files stay open meanwhile.

    `prefix` is what the names of the text weights begin with. Raises `CheckpointError` when a tensor is missing, unknown,
    misshapen or of a dtype that cannot be widened; the vision tower is skipped.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            self._open(folder)
            nested = any(name.startswith(NESTED_PREFIX) for name in self._files)
            self.prefix = NESTED_PREFIX if nested else PLAIN_PREFIX
            self._check(config)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """The tensor `name`, or only some rows (dim 0) or columns (dim 1) of it, in the dtype that it is stored in."""
        lazy = self._files[name].get_slice(name)
        if columns is not None:
            part = lazy[:, columns.start : columns.stop]
        elif rows is not None:
            part = lazy[rows.start : rows.stop]
        else:
            part = lazy[:]
        if not isinstance(part, torch.Tensor):
            raise CheckpointError(f"{name}: read as {type(part).__name__}, not as a tensor")
        return part

    def _open(self, folder: Path) -> None:
        if (folder / INDEX_FILE).exists():
            try:
                index = msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=dict[str, Any])
                where = msgspec.convert(index.get("weight_map"), dict[str, str])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{INDEX_FILE}: {error}") from error
            names = sorted(set(where.values()))
        else:
            where, names = None, [SINGLE_FILE]
        faults = [f"{name}: missing file in {folder}" for name in names if not (folder / name).is_file()]
        if faults:
            raise CheckpointError("; ".join(faults))
        for file_name in names:
            try:
                file = self._stack.enter_context(safe_open(folder / file_name, framework="pt"))
                keys = set(file.keys())
            except Exception as error:  # its own exception type is not exported everywhere
                raise CheckpointError(f"{file_name}: not a readable safetensors file: {error}") from error
            for key in keys:
                if where is None or where.get(key) == file_name:
                    self._files[key] = file
        lost = sorted(set(where or {}) - set(self._files))
        if lost:
            raise CheckpointError("; ".join(f"{key}: named by {INDEX_FILE}, not in its file" for key in lost))

    def _check(self, config: ModelConfig) -> None:
        wanted = expected_shapes(config, self.prefix)
        found = {name for name in self._files if not name.startswith(VISION_PREFIXES)}
        faults = [f"{name}: missing" for name in sorted(wanted.keys() - found)]
        optional = {LM_HEAD: (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
        faults += [f"{name}: not expected" for name in sorted(found - wanted.keys() - optional.keys())]
        for name, shape in sorted((wanted | optional).items()):
            if name not in found:
                continue
            lazy = self._files[name].get_slice(name)
            actual = tuple(lazy.get_shape())
            if actual != shape:
                faults.append(f"{name}: shape {list(actual)}, expected {list(shape)}")
            if lazy.get_dtype() not in READABLE_DTYPES:
                faults.append(f"{name}: dtype {lazy.get_dtype()}, expected one of {', '.join(READABLE_DTYPES)}")
        if faults:
            raise CheckpointError(f"{len(faults)} faults in the checkpoint: " + "; ".join(faults))
