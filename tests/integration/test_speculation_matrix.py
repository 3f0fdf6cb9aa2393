"""Every depth behind every cut, and a thousand requests: guesses change no token, and a handoff changes no guess."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from contracts.rank import DrafterKind
from tests.integration.guessed_batches import TEXT, accepted, generate_all, tokens_of
from tests.integration.handoff_pairs import Worker, link, start_worker

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
DEPTHS = (1, 2, 3, 5, 8)
NUM_PROMPTS, NUM_TOKENS = 64, 128
NUM_REQUESTS, NUM_SHORT_TOKENS = 1000, 24
DECODE: dict[str, dict[str, Any]] = {"d1": {"tp": 1}, "d2": {"tp": 2}, "d4-dcp2": {"tp": 4, "dcp": 2}}
PREFILL: dict[str, dict[str, Any]] = {"p1": {"tp": 1}, "p2": {"tp": 2}, "p4": {"tp": 4}}
PAIRS = ((None, "d1"), ("p2", "d1"), ("p1", "d2"), ("p4", "d1"), ("p2", "d4-dcp2"))

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Pieces of the text, from anywhere in it and 1 to 160 tokens long, a third of them behind tokens that make no sense."""
    text = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(4 * TEXT).ids
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for number in range(count):
        start, size = draw(0, 100), draw(1, 160)
        noise = [draw(3, 2000) for _ in range(draw(1, 20))] if number % 3 == 0 else []
        found.append((*noise, *text[start : start + size]))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Worker]]:
    """The shipped checkpoint on workers of all these cuts, and on one that never guesses."""
    torch.set_num_threads(1)
    sockets = tmp_path_factory.mktemp("s")
    found: dict[str, Worker] = {}
    try:
        found["plain"] = await start_worker("plain", FOLDER, sockets, tp=1)
        for name, how in PREFILL.items():
            found[name] = await start_worker(name, FOLDER, sockets, drafter=DrafterKind.MTP, **how)
        for name, how in DECODE.items():
            found[name] = await start_worker(
                name, FOLDER, sockets, drafter=DrafterKind.MTP, num_speculative_tokens=max(DEPTHS), **how
            )
        for source, destination in (*PAIRS, ("p1", "d1")):
            if source is not None:
                await link(found[source], found[destination])
        yield found
    finally:
        for worker in found.values():
            await worker.group.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(workers: dict[str, Worker]) -> list[list[int]]:
    """What the checkpoint makes of the prompts without guesses."""
    return tokens_of(await generate_all(None, workers["plain"], prompts(NUM_PROMPTS, 1), 0, NUM_TOKENS), NUM_TOKENS)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("source", "destination"), PAIRS)
async def test_guesses_change_no_token(
    workers: dict[str, Worker], plain: list[list[int]], source: str | None, destination: str, depth: int
) -> None:
    """64 prompts, 128 tokens each, greedy in fp32, as batches: those of a worker that does not guess, in fewer steps."""
    here = None if source is None else workers[source]
    found = await generate_all(here, workers[destination], prompts(NUM_PROMPTS, 1), depth, NUM_TOKENS)
    assert tokens_of(found, NUM_TOKENS) == plain
    steps = sum(map(len, accepted(found)))
    assert steps < NUM_PROMPTS * NUM_TOKENS / (1.6 if depth == 1 else 2)


async def test_a_handoff_changes_no_guess(workers: dict[str, Worker]) -> None:
    """1,000 requests, the second half of which repeats the first: step by step as many guesses are right as without a handoff."""
    half = prompts(NUM_REQUESTS // 2, 2)
    alone = await generate_all(None, workers["d1"], half, 3, NUM_SHORT_TOKENS)
    found = await generate_all(workers["p1"], workers["d1"], half + half, 3, NUM_SHORT_TOKENS)
    assert accepted(found) == 2 * accepted(alone)
    assert found == 2 * alone
