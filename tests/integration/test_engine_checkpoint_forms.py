"""The forms in which checkpoints come, and the dtypes in which they run, against the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM

from common.engine.device.cpu import CpuDevice
from common.engine.model.config import load_config
from common.engine.model.fingerprint import checkpoint_fingerprint
from common.engine.model.model import Model
from common.engine.model.shard import RankShard
from common.engine.model.weights import load_weights
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.cache_shape import cache_shape
from common.layout.region import lay_out
from contracts.manifest import Coordinates, Dtype
from tests.integration.reference_prompts import random_model
from tests.integration.test_engine_reference import Runner

TOKENS = tuple(range(20, 120))


def nest(plain: Path, nested: Path) -> None:
    """Rewrite a text checkpoint as published ones are: multimodal names and configuration, and a vision tower."""
    nested.mkdir()
    text = json.loads((plain / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": text.pop("tie_word_embeddings")}
    (nested / "config.json").write_text(json.dumps(outer))
    tensors = load_file(plain / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.visual.patch_embed.proj.weight": torch.zeros(2)}, nested / "model.safetensors")


def test_a_tied_checkpoint_in_many_bf16_files_equals_the_reference(tmp_path: Path) -> None:
    """Weights are widened from bf16; the head is the embedding; the index says which file holds what."""
    random_model(tied=True, spread=0.06).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    reference = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    actual = Runner(tmp_path).feed(TOKENS, [60, 40])
    assert float((actual - expected).abs().max()) <= 3e-4 * max(1.0, float(expected.std()) / 4)


def test_a_multimodal_checkpoint_gives_what_its_text_part_gives(tmp_path: Path) -> None:
    """Same weights under the published names: bit-identical logits."""
    random_model(spread=0.06).save_pretrained(tmp_path / "plain")
    nest(tmp_path / "plain", tmp_path / "nested")
    expected = Runner(tmp_path / "plain").feed(TOKENS, [100])
    assert torch.equal(Runner(tmp_path / "nested").feed(TOKENS, [100]), expected)


def test_a_bf16_engine_stays_close_to_fp32(tmp_path: Path) -> None:
    """Activations and caches in bf16, states in fp32: logits within a few hundredths of their spread on average."""
    random_model(spread=0.06).save_pretrained(tmp_path)
    expected = Runner(tmp_path).feed(TOKENS, [100])
    runner = Runner(tmp_path)
    config = load_config(tmp_path)
    shard = RankShard(config=config)
    shape = cache_shape(config, dtype=Dtype.BFLOAT16, block_size=16, num_blocks=100, num_slots=6)
    region = lay_out(shape, Coordinates())
    runner.caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
    assert {cache.dtype for cache in runner.caches.ssm.values()} == {torch.float32}
    assert {cache.dtype for cache in runner.caches.conv.values()} == {torch.bfloat16}
    weights = load_weights(tmp_path, shard, torch.bfloat16)
    runner.model = Model(shard, weights, runner.caches, None, CpuDevice())
    actual = runner.feed(TOKENS, [70, 29, 1]).float()
    assert float((actual - expected).abs().mean()) < 0.1 * float(expected.std())


@pytest.mark.parametrize("change", ["weight", "configuration"])
def test_a_fingerprint_tells_checkpoints_apart(tmp_path: Path, change: str) -> None:
    """A copy has the same fingerprint; one changed weight or setting gives another."""
    random_model(spread=0.06).save_pretrained(tmp_path)
    before = checkpoint_fingerprint(tmp_path, load_config(tmp_path))
    assert checkpoint_fingerprint(tmp_path, load_config(tmp_path)) == before
    match change:
        case "weight":
            tensors = load_file(tmp_path / "model.safetensors")
            tensors["model.norm.weight"][3] += 1e-3
            save_file(tensors, tmp_path / "model.safetensors")
        case _:
            config = json.loads((tmp_path / "config.json").read_text())
            config["rope_parameters"]["rope_theta"] = 2e5
            (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_fingerprint(tmp_path, load_config(tmp_path)) != before
