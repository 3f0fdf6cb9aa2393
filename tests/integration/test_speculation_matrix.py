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
NUM_SAMPLED, NUM_SAMPLED_TOKENS = 8, 32

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


class Workers:
    """The shipped checkpoint on workers of these cuts, and on one that never guesses; each starts when it is first asked for."""

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets
        self._started: dict[str, Worker] = {}
        self._linked: set[tuple[str, str]] = set()

    async def get(self, name: str) -> Worker:
        """One of them."""
        if name not in self._started:
            how: dict[str, Any] = {"tp": 1}
            if name in PREFILL:
                how = PREFILL[name] | {"drafter": DrafterKind.MTP}
            elif name in DECODE:
                how = DECODE[name] | {"drafter": DrafterKind.MTP, "num_speculative_tokens": max(DEPTHS)}
            self._started[name] = await start_worker(name, FOLDER, self._sockets, **how)
        return self._started[name]

    async def pair(self, source: str | None, destination: str) -> tuple[Worker | None, Worker]:
        """Two that are linked, or one that computes its prompts itself."""
        there = await self.get(destination)
        if source is None:
            return None, there
        here = await self.get(source)
        if (source, destination) not in self._linked:
            self._linked.add((source, destination))
            await link(here, there)
        return here, there

    async def stop(self) -> None:
        """End all of them."""
        for worker in self._started.values():
            await worker.group.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """None of them started yet."""
    torch.set_num_threads(1)
    found = Workers(tmp_path_factory.mktemp("s"))
    try:
        yield found
    finally:
        await found.stop()


async def plain_tokens(workers: Workers, count: int, num_tokens: int) -> list[list[int]]:
    """What the checkpoint makes of the first prompts without guesses."""
    some = prompts(NUM_PROMPTS, 1)[:count]
    return tokens_of(await generate_all(None, await workers.get("plain"), some, 0, num_tokens), num_tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(workers: Workers) -> list[list[int]]:
    """What it makes of all of them."""
    return await plain_tokens(workers, NUM_PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(("source", "destination", "depth"), [("p4", "d1", 5), ("p2", "d4-dcp2", 8)])
async def test_guesses_change_no_token_of_a_sample(workers: Workers, source: str, destination: str, depth: int) -> None:
    """A few of the prompts, their beginnings, and of the cuts those that move most."""
    here, there = await workers.pair(source, destination)
    some = prompts(NUM_PROMPTS, 1)[:NUM_SAMPLED]
    found = await generate_all(here, there, some, depth, NUM_SAMPLED_TOKENS)
    expected = await plain_tokens(workers, NUM_SAMPLED, NUM_SAMPLED_TOKENS)
    assert tokens_of(found, NUM_SAMPLED_TOKENS) == expected
    assert sum(map(len, accepted(found))) < NUM_SAMPLED * NUM_SAMPLED_TOKENS / 1.5


@pytest.mark.long
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("source", "destination"), PAIRS)
async def test_guesses_change_no_token(
    workers: Workers, plain: list[list[int]], source: str | None, destination: str, depth: int
) -> None:
    """64 prompts, 128 tokens each, greedy in fp32, as batches: those of a worker that does not guess, in fewer steps."""
    here, there = await workers.pair(source, destination)
    found = await generate_all(here, there, prompts(NUM_PROMPTS, 1), depth, NUM_TOKENS)
    assert tokens_of(found, NUM_TOKENS) == plain
    steps = sum(map(len, accepted(found)))
    assert steps < NUM_PROMPTS * NUM_TOKENS / (1.6 if depth == 1 else 2)


@pytest.mark.long
async def test_a_handoff_changes_no_guess(workers: Workers) -> None:
    """1,000 requests, the second half of which repeats the first: step by step as many guesses are right as without a handoff."""
    half = prompts(NUM_REQUESTS // 2, 2)
    here, there = await workers.pair("p1", "d1")
    alone = await generate_all(None, there, half, 3, NUM_SHORT_TOKENS)
    found = await generate_all(here, there, half + half, 3, NUM_SHORT_TOKENS)
    assert accepted(found) == 2 * accepted(alone)
    assert found == 2 * alone
