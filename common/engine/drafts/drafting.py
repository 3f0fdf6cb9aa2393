"""The drafter of a rank, as its start asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

import torch

from common.engine.collectives.port import Collectives
from common.engine.device.port import Device
from common.engine.drafts.mtp_drafter import MtpDrafter
from common.engine.drafts.ngram_drafter import NgramDrafter
from common.engine.model.attention_metadata import attention_geometry
from common.engine.model.config import ModelConfig
from common.engine.model.context_group import ContextGroup
from common.engine.model.full_attention import FullAttention, PagedCache
from common.engine.model.model import Model
from common.engine.model.mtp_head import FIRST_KEY, MtpHead
from common.engine.model.shard import RankShard
from common.engine.model.tensor_parallel import TensorParallel
from common.engine.model.weights import load_mtp_weights
from common.engine.ranks.agreement import Agreement
from common.engine.ranks.cache import LayerCaches
from contracts.errors import InvalidValueError
from contracts.rank import DrafterKind, StartRank


def check_drafts(start: StartRank, config: ModelConfig) -> None:
    """Raise `InvalidValueError` for a draft that the checkpoint has no head for, or that cannot be laid out."""
    if start.num_speculative_tokens and start.drafter is DrafterKind.NONE:
        rule = "0 without a drafter"
        raise InvalidValueError(field="num_speculative_tokens", value=start.num_speculative_tokens, rule=rule)
    if start.drafter is DrafterKind.MTP and not config.num_mtp_layers:
        rule = "none or ngram: the checkpoint has no draft head (mtp_num_hidden_layers is 0)"
        raise InvalidValueError(field="drafter", value=start.drafter.value, rule=rule)
    if start.mtp_draft_body_tp1 and start.dcp > 1:
        rule = "false with dcp above 1: ranks that share blocks share the draft's heads too"
        raise InvalidValueError(field="mtp_draft_body_tp1", value=start.mtp_draft_body_tp1, rule=rule)


def make_drafter(
    start: StartRank,
    model: Model,
    caches: LayerCaches,
    *,
    collectives: Collectives | None,
    context: ContextGroup | None,
    agreement: Agreement,
    device: Device,
    dtype: torch.dtype,
) -> MtpDrafter | NgramDrafter | None:
    """The drafter of a rank that has passed `check_drafts`; None where nothing is guessed. Raises `CheckpointError`."""
    match start.drafter:
        case DrafterKind.NONE:
            return None
        case DrafterKind.NGRAM:
            return NgramDrafter(model.config.vocab_size)
        case DrafterKind.MTP:
            pass
        case _:
            assert_never(start.drafter)
    config = model.config
    shard = RankShard(config=config) if start.mtp_draft_body_tp1 else model.shard
    head = MtpHead(
        load_mtp_weights(Path(start.model_dir), shard, dtype),
        model.weights,
        PagedCache(caches.draft_key[0], caches.draft_value[0]),
        body=TensorParallel(shard, None) if start.mtp_draft_body_tp1 else TensorParallel(shard, collectives),
        ranks=model.ranks,
        attention=FullAttention(shard, device, context),
        eps=config.rms_norm_eps,
    )
    geometry = attention_geometry(shard, start.block_size, first_key=FIRST_KEY)
    return MtpDrafter(head, geometry, agreement, device.torch_device)
