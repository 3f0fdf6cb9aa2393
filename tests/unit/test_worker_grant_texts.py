"""What is said of a grant that cannot be good, word for word, and grants that are just good enough."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from common.layout.region import lay_out
from common.layout.shape import CacheShape, LayerType
from contracts.handoff import Grant, RunPrefill
from contracts.manifest import CacheDtypes, Coordinates, Dtype, RankManifest
from contracts.requests import SamplingParams, WorkerRef
from services.decode.core.source_check import refuse_source
from services.prefill.core.grant_check import refuse_grant

GRANT = Grant(worker_id="w", incarnation="i", generation=7, block_ids=(0, 2, 1), slot=0)
RUN = RunPrefill(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    incarnation="ip",
    fence=1,
    num_prompt_tokens=48,
    prompt_hash="",
    sampling=SamplingParams(max_tokens=1, seed=1),
    timeout_ms=1000,
    grant=GRANT,
    num_cached_tokens=0,
)
SOURCE = WorkerRef(worker_id="w", incarnation="i")


@pytest.fixture
def layout() -> RankManifest:
    """A rank of a worker with 3 blocks of 16 and 2 slots."""
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
        num_blocks=3,
        num_slots=2,
    )
    region = lay_out(shape, Coordinates(dp_rank=0, dp_size=1, tp_rank=0, tp_size=1))
    return region.manifest(worker_id="w", incarnation="i", model="m")


@pytest.mark.parametrize(
    ("changes", "num_tokens", "said"),
    [
        ({}, 48, None),
        ({}, 49, "block_ids: 3 blocks of 16 do not hold the prompt's 49 tokens"),
        ({"block_ids": (1,)}, 16, None),
        ({"block_ids": ()}, 0, None),
        ({"block_ids": (2, 3, 1)}, 48, "block_ids: 3 is not allowed; the rule is: 0 to 2"),
        ({"slot": 1}, 48, None),
        ({"slot": 2}, 48, "slot: 2 is not allowed; the rule is: 0 to 1"),
        ({"slot": -1}, 48, "slot: -1 is not allowed; the rule is: 0 to 1"),
        ({"dp_rank": 1}, 48, "dp_rank: 1 is not allowed; the rule is: 0 to 0"),
    ],
)
def test_both_sides_say_the_same_of_a_grant(
    layout: RankManifest, changes: dict[str, Any], num_tokens: int, said: str | None
) -> None:
    """Field, value and rule; what is just within the bounds passes."""
    grant = replace(GRANT, **changes)
    written = refuse_grant(replace(RUN, grant=grant, num_prompt_tokens=num_tokens), layout)
    read = refuse_source(grant, SOURCE, layout, num_tokens, 16)
    assert (written, read) == ((None, None) if said is None else (f"grant.{said}", f"source.{said}"))


def test_a_block_that_is_named_twice_is_told_by_its_number_to_the_writer(layout: RankManifest) -> None:
    """The first of them; one that is named once is not meant."""
    grant = replace(GRANT, block_ids=(0, 2, 1, 2))
    said = "block_ids: 2 is named twice; the rule is: each block once"
    assert refuse_grant(replace(RUN, grant=grant), layout) == f"grant.{said}"
    said = "source.block_ids: a block is named twice; the rule is: each block once"
    assert refuse_source(grant, SOURCE, layout, 48, 16) == said


def test_a_grant_of_another_worker_is_told_with_both_names(layout: RankManifest) -> None:
    """Which one came, and which one was meant."""
    said = refuse_source(replace(GRANT, worker_id="v", incarnation="j"), SOURCE, layout, 48, 16)
    assert said == "source: v j is not allowed; the rule is: w i, for which the memory was reserved"
