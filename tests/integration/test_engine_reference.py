"""The model against the reference implementation, in fp32: logits within the tolerance, and equal tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.device.cpu import CpuDevice
from common.engine.model.attention_metadata import AttentionGeometry
from common.engine.model.config import load_config
from common.engine.model.model import LayerHook, Model, ignore_layer
from common.engine.model.shard import RankShard
from common.engine.model.weights import load_weights
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.cache_shape import cache_shape
from common.engine.ranks.step_buffers import StepBuffers, StepSequence
from common.layout.region import lay_out
from contracts.manifest import Coordinates, Dtype

BLOCK_SIZE = 16
BLOCKS = tuple(range(50, 80))


class Runner:
    """One rank without the rank: a model with its caches and buffers."""

    def __init__(self, folder: Path, *, num_speculative_tokens: int = 0) -> None:
        self.config = config = load_config(folder)
        shard = RankShard(config=config)
        shape = cache_shape(
            config,
            dtype=Dtype.FLOAT32,
            block_size=BLOCK_SIZE,
            num_blocks=200,
            num_slots=6,
            num_speculative_tokens=num_speculative_tokens,
        )
        region = lay_out(shape, Coordinates())
        self.caches = LayerCaches(region, memoryview(bytearray(region.nbytes)))
        device = CpuDevice()
        self.model = Model(shard, load_weights(folder, shard, torch.float32), self.caches, None, device)
        geometry = AttentionGeometry(
            num_query_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            block_size=BLOCK_SIZE,
        )
        self.buffers = StepBuffers(geometry, max_tokens=1024, max_sequences=8, device=device.torch_device)

    def __call__(
        self,
        sequences: Sequence[StepSequence],
        *,
        on_layer_start: LayerHook = ignore_layer,
        on_layer_written: LayerHook = ignore_layer,
    ) -> torch.Tensor:
        """Logits of a step."""
        step = self.buffers.fill(sequences)
        logits = self.model.forward(step, on_layer_start=on_layer_start, on_layer_written=on_layer_written).logits
        assert logits is not None
        return logits

    def feed(self, tokens: Sequence[int], sizes: Sequence[int], *, slot: int = 2) -> torch.Tensor:
        """Logits of all positions of one sequence fed in pieces of `sizes`."""
        outputs, at = [], 0
        for size in sizes:
            piece = tokens[at : at + size]
            outputs.append(
                self([StepSequence(slot=slot, block_ids=BLOCKS, start=at, token_ids=piece, num_logits=len(piece))])
            )
            at += size
        return torch.cat(outputs)


def pieces(total: int, size: int) -> list[int]:
    """Sizes that add up to `total`."""
    return [size] * (total // size) + ([total % size] if total % size else [])


@pytest.mark.parametrize("size", [1000, 64, 37, 1])
def test_logits_equal_the_reference_however_the_prompt_is_cut(reference: Any, size: int) -> None:
    """One pass, chunks of 64, odd chunks and single steps give the reference's logits at every position."""
    runner = Runner(reference.folder)
    for prompt in reference.prompts:
        tokens = (prompt.token_ids + prompt.output_ids)[:-1]
        runner.caches.zero_slot(2)
        logits = runner.feed(tokens, pieces(len(tokens), size))
        assert float((logits - prompt.logits).abs().max()) <= reference.tolerance


def test_the_last_layer_is_computed_for_rows_with_logits_alone_and_nothing_changes(reference: Any) -> None:
    """A mixed step of chunks and single tokens, with and without logits: the rows that are wanted are those of the whole step."""
    tables = [list(range(i, 196, 7)) for i in range(4)]
    starts = (40, 0, 7, 0)
    sizes = (1, 90, 3, 1)

    def step(wanted: Sequence[int]) -> torch.Tensor:
        runner = Runner(reference.folder)
        tokens = reference.prompts[3].token_ids
        for i, start in enumerate(starts):
            if start:
                runner([StepSequence(slot=i, block_ids=tables[i], start=0, token_ids=tokens[:start], num_logits=1)])
        return runner(
            [
                StepSequence(
                    slot=i, block_ids=tables[i], start=start, token_ids=tokens[start : start + size], num_logits=count
                )
                for i, (start, size, count) in enumerate(zip(starts, sizes, wanted, strict=True))
            ]
        )

    whole = step(sizes).split_with_sizes(list(sizes))
    for wanted in ((1, 1, 1, 1), (0, 90, 0, 1), (1, 5, 2, 0), (0, 0, 1, 0), (1, 0, 0, 0)):
        expected = torch.cat([rows[len(rows) - count :] for rows, count in zip(whole, wanted, strict=True)])
        assert torch.allclose(step(wanted), expected, atol=1e-4)


def test_a_step_without_logits_still_writes_the_last_layer(reference: Any) -> None:
    """Chunks that end nowhere give no logits, and what follows them is as if they had."""
    prompt = reference.prompts[3]
    runner = Runner(reference.folder)
    step = [StepSequence(slot=2, block_ids=BLOCKS, start=0, token_ids=prompt.token_ids[:200], num_logits=0)]
    assert runner.model.forward(runner.buffers.fill(step)) == (None, None)
    rest = prompt.token_ids[200:]
    logits = runner([StepSequence(slot=2, block_ids=BLOCKS, start=200, token_ids=rest, num_logits=len(rest))])
    assert float((logits - prompt.logits[200 : 200 + len(rest)]).abs().max()) <= reference.tolerance


def test_greedy_tokens_of_a_batch_equal_the_reference(reference: Any) -> None:
    """All prompts at once, prefilled in chunks beside sequences that already decode, give the reference's 64 tokens each."""
    runner = Runner(reference.folder)
    tables = [list(range(i, 196, 7)) for i in range(4)]
    sequences = [list(prompt.token_ids) for prompt in reference.prompts]
    done = [0] * 4
    while any(len(s) < len(p.token_ids) + 64 for s, p in zip(sequences, reference.prompts, strict=True)):
        active = [i for i, p in enumerate(reference.prompts) if len(sequences[i]) < len(p.token_ids) + 64]
        step = []
        for i in active:
            piece = sequences[i][done[i] : done[i] + 50]
            step.append(
                StepSequence(slot=(5, 0, 3, 1)[i], block_ids=tables[i], start=done[i], token_ids=piece, num_logits=1)
            )
            done[i] += len(piece)
        chosen = runner(step).argmax(-1).tolist()
        for i, token in zip(active, chosen, strict=True):
            if done[i] == len(sequences[i]):
                sequences[i].append(token)
    for sequence, prompt in zip(sequences, reference.prompts, strict=True):
        assert tuple(sequence[len(prompt.token_ids) :]) == prompt.output_ids


def test_room_for_speculation_changes_nothing(reference: Any) -> None:
    """With k = 2 a slot has three states and five conv columns; plain decoding in two slots gives the same logits."""
    runner = Runner(reference.folder, num_speculative_tokens=2)
    prompt = reference.prompts[1]
    logits = runner.feed(prompt.token_ids, [63, 1])
    assert float((logits - prompt.logits[:64]).abs().max()) <= reference.tolerance
    plain = Runner(reference.folder)
    plain.feed(prompt.token_ids, [64])
    steps = [
        StepSequence(slot=slot, block_ids=BLOCKS, start=64, token_ids=[prompt.output_ids[0]], num_logits=1)
        for slot in (2, 3)
    ]
    assert torch.allclose(runner(steps)[0], plain(steps)[0], atol=reference.tolerance)


def test_conv_channels_in_the_wrong_order_are_noticed(reference: Any) -> None:
    """A conv state moved as one slab, with K and V channels rotated, is a visible error: the comparison can fail."""
    runner = Runner(reference.folder)
    prompt = reference.prompts[2]
    runner.feed(prompt.token_ids, [131])
    for conv in runner.caches.conv.values():
        conv[2] = conv[2].roll(32, dims=-1)
    step = StepSequence(slot=2, block_ids=BLOCKS, start=131, token_ids=[prompt.output_ids[0]], num_logits=1)
    assert float((runner([step])[0] - prompt.logits[131]).abs().max()) > 100 * reference.tolerance


def test_each_layer_is_announced_once_when_its_cache_is_complete(reference: Any) -> None:
    """`on_layer_written` comes in layer order, after that layer's content is there and before later layers run."""
    runner = Runner(reference.folder)
    caches = runner.caches
    written: list[int] = []
    started: list[int] = []

    def check(layer: int) -> None:
        assert started[-1] == layer
        full = layer in caches.key
        content = caches.key[layer][BLOCKS[0]] if full else caches.ssm[layer][2]
        assert bool(content.any())
        later = [i for i in range(layer + 1, runner.config.num_hidden_layers) if i in caches.ssm]
        assert not any(caches.ssm[i][2].any() for i in later)
        written.append(layer)

    step = StepSequence(slot=2, block_ids=BLOCKS, start=0, token_ids=[5, 6, 7], num_logits=1)
    runner([step], on_layer_written=check, on_layer_start=started.append)
    assert written == started == list(range(runner.config.num_hidden_layers))


def test_tokens_may_be_taken_back_behind_any_of_them(reference: Any) -> None:
    """Rounds of up to four tokens, some of them wrong: each sequence goes on behind as many as were right, in one batch.

    The right ones have the reference's logits, whatever was guessed behind them, in whatever company.
    """
    runner = Runner(reference.folder, num_speculative_tokens=3)
    prompts = reference.prompts
    tables = [list(range(i, 196, 7)) for i in range(4)]
    truths = [list(prompt.token_ids + prompt.output_ids) for prompt in prompts]
    ends = [len(prompt.token_ids) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        runner([StepSequence(slot=i, block_ids=tables[i], start=0, token_ids=prompt.token_ids, num_logits=1)])
    rows, rng = [0] * 4, random.Random(7)
    for _ in range(12):
        step, num_right = [], []
        for i, truth in enumerate(truths):
            size, right = rng.randint(1, 4), rng.randint(1, 4)
            piece = truth[ends[i] : ends[i] + size]
            wrong = [(token + 1) % runner.config.vocab_size for token in piece[right:]]
            num_right.append(min(size, right))
            step.append(
                StepSequence(
                    slot=i,
                    block_ids=tables[i],
                    start=ends[i],
                    token_ids=piece[:right] + wrong,
                    num_logits=size,
                    state_row=rows[i],
                    checkpoints=True,
                )
            )
        found = runner(step).split_with_sizes([each.num_logits for each in step])
        for i, (prompt, logits) in enumerate(zip(prompts, found, strict=True)):
            expected = prompt.logits[ends[i] : ends[i] + num_right[i]]
            assert float((logits[: num_right[i]] - expected).abs().max()) <= reference.tolerance
            rows[i] = num_right[i] - 1
            ends[i] += num_right[i]


def test_a_state_that_was_not_taken_back_is_noticed(reference: Any) -> None:
    """A planted fault: going on behind a token that was wrong, in one layer's recurrent state alone, is a visible error."""
    runner = Runner(reference.folder, num_speculative_tokens=1)
    prompt = reference.prompts[1]
    runner.feed(prompt.token_ids, [64])
    wrong = [prompt.output_ids[0], (prompt.output_ids[1] + 1) % runner.config.vocab_size]
    step = StepSequence(slot=2, block_ids=BLOCKS, start=64, token_ids=wrong, num_logits=1, checkpoints=True)
    runner([step])
    ssm = next(iter(runner.caches.ssm.values()))
    ssm[2, 0] = ssm[2, 1]
    step = StepSequence(slot=2, block_ids=BLOCKS, start=65, token_ids=[prompt.output_ids[1]], num_logits=1)
    assert float((runner([step])[0] - prompt.logits[65]).abs().max()) > 10 * reference.tolerance
