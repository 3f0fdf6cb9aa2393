"""Models and workers whose sizes are estimated."""

from __future__ import annotations

from typing import Any

from common.engine.model.config import ModelConfig
from contracts.manifest import Dtype
from services.launcher.core.estimate import Estimate, make_estimate
from services.launcher.core.worker_estimate import WorkerSize

MIB, GIB = 1 << 20, 1 << 30


def raw_config(**changes: Any) -> dict[str, Any]:
    """The configuration of the dense 27B model, as its config.json nests it."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
    }
    return {"model_type": "qwen3_5", "text_config": text | changes, "tie_word_embeddings": False}


WIDE_GQA = {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32}
"""Eight query heads a KV head: at tp 8 four ranks hold the same one."""
FLAT = {"num_hidden_layers": 8}
"""Two layers with full attention, six with linear attention."""


def worker_size(role: str, tp: int, dcp: int = 1, **changes: Any) -> WorkerSize:
    """A worker of bfloat16 and blocks of 16 tokens."""
    values: dict[str, Any] = {"dp": 1, "dtype": Dtype.BFLOAT16, "block_size": 16}
    return WorkerSize(role=role, tp=tp, dcp=dcp, **(values | changes))


def estimate_pair(config: ModelConfig, prefill_tp: int, tp: int, dcp: int, *, num_tokens: int = 1000) -> Estimate:
    """What a pair of workers takes and moves for one request."""
    sizes = worker_size("prefill", prefill_tp), worker_size("decode", tp, dcp)
    return make_estimate(config, *sizes, num_tokens=num_tokens, memory_bytes=None)
