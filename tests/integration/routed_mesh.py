"""A real router, but for HTTP, before the broker and the workers of `whole_mesh`, and clients that keep what they get: in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from common.engine.fake.tokens import VOCAB_SIZE, fake_token
from common.runtime.clock import Clock, Deadline
from contracts import ids
from contracts.errors import PdmeshError
from contracts.requests import SamplingParams
from services.router.core.prompt_frames import prompt_hash
from services.router.core.remainder import Remainder
from services.router.core.retry import RetryPolicy
from services.router.core.retry_budget import RetryBudget
from services.router.core.vocabulary import Vocabulary
from services.router.dispatch import Job
from services.router.generation import Generator, Progress
from services.router.interruption import Interruptible
from services.router.settings import RouterSettings
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, Mesh, run_mesh
from tests.simulation.sim_router import open_router

ROUTER_ID = "router-1"
"""Not the one of `whole_mesh`, which only listens."""
TIMEOUT_S = 30.0


def handoff_of(number: int, attempt: int = 0) -> str:
    """An attempt at a request."""
    return ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), attempt)


def prompt_of(number: int) -> list[int]:
    """Prompts differ in length."""
    return list(range(1, 41 + number % 30))


def tokens_of(number: int, count: int) -> list[int]:
    """What an engine draws for a request."""
    start = len(prompt_of(number))
    return [fake_token(number, start + index) for index in range(count)]


@dataclass
class Client:
    """What one client got, and when, in seconds since it asked. `ended` is a finish reason, an error's code, or "left"."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: str = ""
    first_s: float | None = None
    ended_s: float = 0.0


class Router:
    """One router with the settings that it has unless it is told others, and its clients."""

    def __init__(self, generator: Generator, clock: Clock) -> None:
        settings = RouterSettings(model=Path("fake"))
        policy = RetryPolicy(
            max_attempts=settings.max_attempts,
            max_failures=settings.max_failures,
            max_preemptions=settings.max_preemptions,
            first_delay_s=settings.retry_delay_s,
            max_delay_s=settings.max_retry_delay_s,
        )
        budget = RetryBudget(
            share=settings.retry_share,
            floor_per_s=settings.retry_floor_per_s,
            capacity=settings.retry_budget,
            now=clock.monotonic(),
        )
        self.generator = dataclasses.replace(
            generator, policy=policy, budget=budget, reroute_wait_s=settings.reroute_wait_s
        )
        self.clients: dict[int, Client] = {}
        self._clock = clock

    def spell(self, texts: Mapping[int, str]) -> None:
        """Give tokens a text; without one they say nothing."""
        vocab = {text: token_id for token_id, text in texts.items()}
        vocabulary = Vocabulary(vocab=vocab, added={}, silent=(), vocab_size=VOCAB_SIZE)
        self.generator = dataclasses.replace(self.generator, vocabulary=vocabulary)

    async def serve(
        self,
        number: int,
        *,
        max_tokens: int = NUM_OUTPUT_TOKENS,
        stops: tuple[str, ...] = (),
        timeout_s: float = TIMEOUT_S,
        leaves_after_s: float | None = None,
        **sampling: Any,
    ) -> Client:
        """One request to its end, or until its client leaves."""
        client = self.clients[number] = Client(number)
        began = self._clock.monotonic()

        async def take(progress: Progress) -> None:
            if client.first_s is None and progress.token_ids:
                client.first_s = self._clock.monotonic() - began
            client.token_ids += progress.token_ids
            client.text += progress.text
            client.ended = str(progress.finish_reason or "")

        packed = array("I", prompt_of(number)).tobytes()
        job = Job(
            request_id=ids.request_id(number.to_bytes(10, "big")),
            whole=Remainder(
                packed=packed,
                digest=prompt_hash(packed),
                sampling=SamplingParams(max_tokens=max_tokens, seed=number, temperature=0.0, **sampling),
            ),
            stops=stops,
        )
        deadline = Deadline.after(self._clock, timeout_s)
        scope = Interruptible(deadline)
        try:
            async with asyncio.timeout(leaves_after_s), scope:
                await self.generator.run(job, deadline, take, scope)
        except PdmeshError as error:
            client.ended = str(error.code)
        except TimeoutError:
            client.ended = "left"
        client.ended_s = self._clock.monotonic() - began
        return client


async def open_real_router(mesh: Mesh, group: asyncio.TaskGroup) -> Router:
    """Start it, and wait until it knows a way through the mesh."""
    opened = await open_router(
        ROUTER_ID, mesh.server.connect(), mesh.clock, structlog.get_logger(), group, random.Random(1)
    )
    while not opened.has_route:
        await mesh.clock.sleep(0.1)
    return Router(opened.generator, mesh.clock)


def run_routed(scenario: Callable[[Mesh, Router], Awaitable[None]], decode: Mapping[str, Any], **options: Any) -> None:
    """Run a scenario on a new pair of workers behind a real router, then stop it. `options` are those of `Mesh`."""

    async def main(mesh: Mesh) -> None:
        await scenario(mesh, await open_real_router(mesh, mesh.group))

    run_mesh(main, {}, decode, has_mixed=False, **options)


async def all_back(mesh: Mesh) -> None:
    """Wait until no handoff is under way, and a moment for those who let go in the background; then all memory has to be back."""
    while mesh.broker.num_in_flight:
        await mesh.clock.sleep(0.05)
    await mesh.clock.sleep(0.5)
    mesh.assert_empty()
