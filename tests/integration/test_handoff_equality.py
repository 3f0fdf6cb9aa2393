"""A handoff changes no token: every prefill size against every decode size gives the reference's greedy output in fp32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3_5ForCausalLM

import common.engine.transfer.peers
from common.layout.planner import ReshardPlan, plan
from common.layout.templates import SlotTemplate
from contracts.manifest import RankManifest, Role
from tests.integration.handoff_pairs import BLOCK_SIZE, CHUNK, NUM_SLOTS, Worker, hand_over, link, start_worker
from tests.integration.make_reference import hash_weights
from tests.integration.reference_prompts import MIN_MARGIN, NUM_OUTPUT_TOKENS, random_model
from tests.integration.stored_reference import StoredPrompt, StoredReference, load_reference

SIZES = (1, 2, 4)
PAIRS = [(prefill, decode) for prefill in SIZES for decode in SIZES]
NUM_FEW = 20
# Thread ranks take their time on two cores: for each day is a third of the prompts for each pair, in turn, so that the pairs have
# all of them together, and as many tokens as need a new block; all of both are for `make test-long`.
CASES = [
    pytest.param(*pair, slice(number % 3, None, 3), NUM_FEW, id=f"{pair[0]}-{pair[1]}-few")
    for number, pair in enumerate(PAIRS)
] + [
    pytest.param(*pair, slice(None), NUM_OUTPUT_TOKENS, id=f"{pair[0]}-{pair[1]}", marks=pytest.mark.long)
    for pair in PAIRS
]
BATCH = NUM_SLOTS
SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["random", "tiny"])
def tokens_reference(request: pytest.FixtureRequest) -> tuple[str, StoredReference]:
    """Which checkpoint, and 32 prompts of 1 to 600 tokens with the reference's output, no step of it close to call."""
    return str(request.param), load_reference(request.param)


@pytest.fixture(scope="module")
def checkpoint(tokens_reference: tuple[str, StoredReference], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the stored outputs belong to: a random one as `save_pretrained` writes it, and the shipped one."""
    name, stored = tokens_reference
    folder = SHIPPED
    if name == "random":
        folder = tmp_path_factory.mktemp("checkpoint")
        random_model().save_pretrained(folder)
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert hash_weights(model) == stored.weights_sha256
    return folder


@pytest.fixture
def prompts(tokens_reference: tuple[str, StoredReference]) -> tuple[StoredPrompt, ...]:
    """The prompts of the checkpoint."""
    return tokens_reference[1].prompts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Worker]]:
    """A prefill and a decode worker of every size, each prefill worker linked with each decode worker."""
    sockets = tmp_path_factory.mktemp("s")
    started: dict[str, Worker] = {}
    try:
        for role in ("p", "d"):
            for tp in SIZES:
                started[f"{role}{tp}"] = await start_worker(f"{role}{tp}", checkpoint, sockets, tp)
        for prefill, decode in PAIRS:
            await link(started[f"p{prefill}"], started[f"d{decode}"])
        yield started
    finally:
        for worker in started.values():
            await worker.group.stop()


async def test_the_prompts_cover_chunks_and_partial_blocks(prompts: tuple[StoredPrompt, ...]) -> None:
    """32 prompts; at least 6 of them need three chunks or more and end inside a block."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    hard = [length for length in lengths if length > 2 * CHUNK and length % BLOCK_SIZE]
    assert len(lengths) == 32
    assert (min(lengths), max(lengths)) == (1, 600)
    assert len(hard) >= 6
    assert min(margin for prompt in prompts for margin in prompt.margins) >= MIN_MARGIN


@pytest.mark.parametrize(("prefill", "decode", "which", "count"), CASES)
async def test_every_pair_of_sizes_gives_the_reference_tokens(
    prompts: tuple[StoredPrompt, ...],
    workers: dict[str, Worker],
    *,
    prefill: int,
    decode: int,
    which: slice,
    count: int,
) -> None:
    """The tokens of each prompt, decoded where they were not prefilled, equal the reference without exception."""
    source, destination = workers[f"p{prefill}"], workers[f"d{decode}"]
    prompts = prompts[which]
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        outputs = await hand_over(source, destination, [prompt.token_ids for prompt in batch], count)
        assert outputs == [prompt.output_ids[:count] for prompt in batch]


async def test_tcp_gives_the_reference_tokens(
    checkpoint: Path, prompts: tuple[StoredPrompt, ...], tmp_path: Path
) -> None:
    """Two prefill ranks hand over to one decode rank by TCP, into blocks that lie anywhere: the same tokens again."""
    batch = [*prompts[:2], max(prompts, key=lambda prompt: len(prompt.token_ids)), prompts[-1]]
    started: list[Worker] = []
    try:
        for name, tp in (("p2", 2), ("d1", 1)):
            started.append(await start_worker(name, checkpoint, tmp_path, tp, transport="tcp"))
        source, destination = started
        assert {rank.region.transport for rank in destination.info.ranks if rank.region is not None} == {"tcp"}
        await link(source, destination)
        outputs = await hand_over(source, destination, [prompt.token_ids for prompt in batch], 8, spread=0)
    finally:
        for worker in started:
            await worker.group.stop()
    assert outputs == [prompt.output_ids[:8] for prompt in batch]


async def test_conv_as_one_slab_is_seen(
    prompts: tuple[StoredPrompt, ...], workers: dict[str, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a plan that moves each rank's conv state as one slab, two ranks into one, changes tokens."""

    def slab_plan(source: Sequence[RankManifest], destination: Sequence[RankManifest]) -> ReshardPlan:
        good = plan(source, destination)
        templates: list[Any] = []
        seen: set[tuple[int, int]] = set()
        for template in good.templates:
            if not isinstance(template, SlotTemplate) or template.part.role is not Role.CONV:
                templates.append(template)
                continue
            key = (template.part.layer, template.part.src_rank)
            if key in seen:
                continue
            seen.add(key)
            slab = template.src_row_stride
            base = template.dst_offset - template.part.src_rank * template.row_bytes
            offset = base + template.part.src_rank * slab
            templates.append(msgspec.structs.replace(template, row_bytes=slab, dst_offset=offset))
        return msgspec.structs.replace(good, templates=tuple(templates))

    source, destination = workers["p2"], workers["d1"]
    monkeypatch.setattr(common.engine.transfer.peers, "plan", slab_plan)
    await link(source, destination)
    try:
        batch = prompts[:BATCH]
        outputs = await hand_over(source, destination, [prompt.token_ids for prompt in batch], NUM_OUTPUT_TOKENS)
    finally:
        monkeypatch.undo()
        await link(source, destination)
    assert outputs != [prompt.output_ids for prompt in batch]
    assert [output[0] for output in outputs] == [prompt.output_ids[0] for prompt in batch]
