"""The draft head against the reference implementation's layer, in fp32, fed whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3_5ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from common.engine.device.cpu import CpuDevice
from common.engine.model.attention_metadata import AttentionGeometry, SequenceView
from common.engine.model.config import load_config
from common.engine.model.full_attention import FullAttention, PagedCache
from common.engine.model.mtp_head import FIRST_KEY, MtpHead
from common.engine.model.shard import RankShard
from common.engine.model.tensor_parallel import TensorParallel
from common.engine.model.weights import load_mtp_weights, load_weights
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.cache_shape import cache_shape
from common.layout.region import lay_out
from contracts.manifest import Coordinates, Dtype

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
BLOCK_SIZE = 16
BLOCK_IDS = (7, 3, 11, 0, 5)
NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.layers.0.": "mtp_block.",
    "mtp.norm.": "post_norm.",
}


class Expected:
    """What the reference says of one text: its states after the final norm, what the head makes of each pair, and the guesses."""

    def __init__(self) -> None:
        model = Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
        config = deepcopy(model.config)
        config.layer_types = ["full_attention"]
        layer = MtpLayer(config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 0).eval()
        held = load_file(FOLDER / "model.safetensors")
        state = {
            new + name[len(old) :]: held[name].float()
            for old, new in NAMES.items()
            for name in held
            if name.startswith(old)
        }
        layer.load_state_dict(state)
        self.token_ids = torch.randint(3, config.vocab_size, (70,), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            self.hidden = model.model(self.token_ids[None]).last_hidden_state[0]
            pairs = len(self.token_ids) - 1
            positions = torch.arange(pairs)[None]
            embedded = model.get_input_embeddings()(self.token_ids[None, 1:])
            mask = torch.full((pairs, pairs), -torch.inf).triu(1)[None, None]
            self.output = layer(
                embedded,
                self.hidden[None, :pairs],
                position_embeddings=model.model.rotary_emb(embedded, positions),
                attention_mask=mask,
                position_ids=positions,
                cache=None,
            )[0]
            self.logits = nn.functional.linear(self.output, model.lm_head.weight)


@pytest.fixture(scope="module")
def expected() -> Expected:
    """The reference's figures for one text."""
    return Expected()


class Head:
    """One rank's head over caches of its own, full of what an earlier owner may have left."""

    def __init__(self) -> None:
        config = load_config(FOLDER)
        shard, device = RankShard(config=config), CpuDevice()
        shape = cache_shape(
            config,
            dtype=Dtype.FLOAT32,
            block_size=BLOCK_SIZE,
            num_blocks=12,
            num_slots=1,
            num_speculative_tokens=3,
            keeps_draft=True,
        )
        region = lay_out(shape, Coordinates())
        self.caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
        cache = PagedCache(self.caches.draft_key[0], self.caches.draft_value[0])
        for part in cache:
            part.fill_(torch.nan)
        ranks = TensorParallel(shard, None)
        self.head = MtpHead(
            load_mtp_weights(FOLDER, shard, torch.float32),
            load_weights(FOLDER, shard, torch.float32),
            cache,
            body=ranks,
            ranks=ranks,
            attention=FullAttention(shard, device, None),
            eps=config.rms_norm_eps,
        )
        self.geometry = AttentionGeometry(
            num_query_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            block_size=BLOCK_SIZE,
            first_key=FIRST_KEY,
        )

    def feed(self, expected: Expected, sizes: Sequence[int], *, shift: int = 1) -> torch.Tensor:
        """All pairs of the text, in pieces, kept `shift` behind their positions."""
        outputs, at = [], 0
        for size in sizes:
            metadata = self.geometry.build([SequenceView(block_ids=BLOCK_IDS, start=at + shift, num_tokens=size)])
            some = slice(at, at + size)
            outputs.append(
                self.head.forward(
                    expected.hidden[some],
                    expected.token_ids[at + 1 : at + size + 1],
                    torch.arange(at, at + size),
                    metadata,
                )
            )
            at += size
        return torch.cat(outputs)


@pytest.mark.parametrize("sizes", [(69,), (1,) * 69, (30, 1, 38)])
def test_pairs_give_what_the_reference_makes_of_them(expected: Expected, sizes: Sequence[int]) -> None:
    """Whole, one by one and in odd pieces; what an earlier owner left, at the empty first position too, is not seen."""
    head = Head()
    output = head.feed(expected, sizes)
    assert float((output - expected.output).abs().max()) < 1e-4
    logits = head.head.logits(output)
    assert logits is not None
    assert float((logits - expected.logits).abs().max()) < 3e-4
    assert logits.argmax(-1).equal(expected.logits.argmax(-1))


def test_a_draft_cache_that_is_shifted_by_one_is_noticed(expected: Expected) -> None:
    """A planted fault: pairs kept at their own position lose the first one, and every later guess sees other keys."""
    output = Head().feed(expected, (69,), shift=0)
    assert not float((output[1:] - expected.output[1:]).abs().max()) < 1e-2
