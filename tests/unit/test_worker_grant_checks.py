"""Grants that cannot be good are refused by name before anything is computed or read for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.layout.region import lay_out
from common.layout.shape import CacheShape, LayerType
from contracts.handoff import Grant, RunPrefill
from contracts.manifest import CacheDtypes, Coordinates, Dtype, RankManifest
from contracts.requests import SamplingParams, WorkerRef
from services.decode.core.source_check import refuse_source
from services.prefill.core.grant_check import refuse_grant

GRANT = Grant(worker_id="w", incarnation="i", dp_rank=1, generation=7, block_ids=(3, 9, 0), slot=3)
RUN = RunPrefill(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    incarnation="ip",
    fence=1,
    num_prompt_tokens=40,
    prompt_hash="",
    sampling=SamplingParams(max_tokens=1, seed=1),
    timeout_ms=1000,
    grant=GRANT,
    num_cached_tokens=0,
)
CASES: list[tuple[dict[str, Any], str]] = [
    ({"block_ids": (3, 9)}, "block_ids: 2 blocks of 16 do not hold the prompt's 40 tokens"),
    ({"block_ids": (3, 9, 3)}, "is named twice; the rule is: each block once"),
    ({"block_ids": (3, 9, 10)}, "block_ids: 10 is not allowed; the rule is: 0 to 9"),
    ({"slot": 4}, "slot: 4 is not allowed; the rule is: 0 to 3"),
    ({"dp_rank": 2}, "dp_rank: 2 is not allowed; the rule is: 0 to 1"),
]


@pytest.fixture
def layout() -> RankManifest:
    """A rank of a worker of two replicas with 10 blocks and 4 slots each."""
    floats = CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32)
    shape = CacheShape(
        layer_types=(LayerType.LINEAR, LayerType.FULL),
        num_kv_heads=2,
        head_dim=8,
        num_key_heads=4,
        num_value_heads=4,
        key_head_dim=8,
        value_head_dim=8,
        conv_kernel=4,
        dtypes=floats,
        block_size=16,
        num_blocks=10,
        num_slots=4,
    )
    region = lay_out(shape, Coordinates(dp_rank=0, dp_size=2, tp_rank=0, tp_size=1))
    return region.manifest(worker_id="w", incarnation="i", model="m")


@pytest.mark.parametrize(("changes", "rule"), CASES)
def test_a_grant_to_write_that_cannot_be_decodes_is_refused(
    layout: RankManifest, changes: dict[str, Any], rule: str
) -> None:
    """The field, the value and the rule; the same grant unchanged is fine."""
    assert refuse_grant(RUN, layout) is None
    grant = msgspec.structs.replace(GRANT, **changes)
    told = refuse_grant(msgspec.structs.replace(RUN, grant=grant), layout)
    assert told is not None
    assert told.startswith("grant.")
    assert rule in told


def test_more_cached_tokens_than_the_prompt_has_are_refused(layout: RankManifest) -> None:
    """All of the prompt may be cached, not more."""
    for num_cached, rule in ((40, None), (41, "num_cached_tokens: 41 is not allowed; the rule is: 0 to 40")):
        assert refuse_grant(msgspec.structs.replace(RUN, num_cached_tokens=num_cached), layout) == rule


@pytest.mark.parametrize(("changes", "rule"), CASES)
def test_a_grant_to_read_that_cannot_be_prefills_is_refused(
    layout: RankManifest, changes: dict[str, Any], rule: str
) -> None:
    """The same rules for what decode is to read."""
    source = WorkerRef(worker_id="w", incarnation="i")
    assert refuse_source(GRANT, source, layout, 40, 16) is None
    told = refuse_source(msgspec.structs.replace(GRANT, **changes), source, layout, 40, 16)
    assert told is not None
    assert told.startswith("source.")
    assert rule in told


@pytest.mark.parametrize("changes", [{"worker_id": "v"}, {"incarnation": "j"}])
def test_a_grant_of_another_worker_than_memory_was_reserved_for_is_refused(
    layout: RankManifest, changes: dict[str, str]
) -> None:
    """Another worker, or another start of it."""
    told = refuse_source(
        msgspec.structs.replace(GRANT, **changes), WorkerRef(worker_id="w", incarnation="i"), layout, 40, 16
    )
    assert told is not None
    assert told.endswith("the rule is: w i, for which the memory was reserved")
