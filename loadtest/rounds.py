"""Requests to several meshes in one run, in rounds that take turns: so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from common.runtime.clock import Clock
from contracts.errors import PdmeshError
from loadtest.client import CompletionClient, Prompt, Sample
from loadtest.mesh import Mesh

_WARM_UP_ROUND: Final = -1


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go. `mesh` is None for a server that somebody else runs."""

    mode: str
    url: str
    mesh: Mesh | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests are sent. Each mesh gets every prompt once a round; `concurrency` requests are under way at once."""

    num_rounds: int
    concurrency: int
    timeout_s: float


def random_prompts(
    *, count: int, num_prompt_tokens: int, num_output_tokens: int, vocab_size: int, seed: int
) -> tuple[Prompt, ...]:
    """Prompts of random token ids, all different; the same arguments give the same prompts everywhere."""
    stream = random.Random(f"prompts/{seed}/{num_prompt_tokens}")
    return tuple(
        Prompt(
            token_ids=tuple(stream.randrange(vocab_size) for _ in range(num_prompt_tokens)),
            num_output_tokens=num_output_tokens,
            seed=place,
        )
        for place in range(count)
    )


def orders(modes: Sequence[str], num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Who is asked in which order, round by round: everybody is first, second and so on equally often."""
    for number in range(num_rounds):
        shift = number % len(modes)
        yield (*modes[shift:], *modes[:shift])


async def run_rounds(
    targets: Sequence[Target],
    prompts: Sequence[Prompt],
    load: Load,
    *,
    warm_up: Sequence[Prompt] = (),
    clock: Clock,
    say: Callable[[str], None],
) -> list[Sample]:
    """Send `warm_up` to every target, then the rounds; return the samples of the rounds. Raises MeshFailed if a mesh ends, PdmeshError if a warm-up fails: there is nothing to measure then."""
    by_mode = {target.mode: target for target in targets}
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        clients: dict[str, CompletionClient] = {}
        models: dict[str, str] = {}
        for target in targets:
            client = CompletionClient(target.url, clock, timeout_s=load.timeout_s, concurrency=load.concurrency)
            clients[target.mode] = await stack.enter_async_context(client)
            models[target.mode] = await client.model()

        async def block(mode: str, asked: Sequence[Prompt], number: int) -> list[Sample]:
            block_samples = await _send(clients[mode], models[mode], asked, load.concurrency, block=(mode, number))
            mesh = by_mode[mode].mesh
            if mesh is not None:
                mesh.check_alive()
            return block_samples

        for mode in by_mode:
            for sample in await block(mode, warm_up, _WARM_UP_ROUND):
                if sample.error:
                    raise PdmeshError(f"a warm-up of {mode} failed: {sample.error}")
        for number, order in enumerate(orders(tuple(by_mode), load.num_rounds)):
            for mode in order:
                samples += await block(mode, prompts, number)
            say(f"round {number + 1} of {load.num_rounds}: {len(prompts)} requests to each of {len(order)} targets")
    return samples


async def _send(
    client: CompletionClient, model: str, prompts: Sequence[Prompt], concurrency: int, *, block: tuple[str, int]
) -> list[Sample]:
    """All prompts, in order, `concurrency` at once; the samples in the order of the prompts."""
    mode, number = block
    samples: dict[int, Sample] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for place, prompt in waiting:
            samples[place] = await client.complete(prompt, model=model, mode=mode, round_number=number, place=place)

    async with asyncio.TaskGroup() as group:
        for worker in range(min(concurrency, len(prompts))):
            group.create_task(work(), name=f"{mode} sender {worker}")
    return [samples[place] for place in sorted(samples)]
