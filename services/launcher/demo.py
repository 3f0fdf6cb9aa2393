"""`pdmesh demo`: two requests, and how their caches moved, told by the event stream alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import aiohttp

from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from contracts.errors import PdmeshError
from contracts.events import HandoffEvent
from services.launcher.bus import with_bus
from services.launcher.chat import ChatClient
from services.launcher.console import Console
from services.launcher.core.table import render
from services.launcher.core.timeline import build, by_handoff, tells_all
from services.launcher.mesh import RunningMesh
from services.launcher.stream import read_all

_QUESTION: Final = "In the beginning God created"
_OPENING: Final = "It is a truth universally acknowledged, that"
_NUM_TOKENS: Final = 48
_SAMPLING: Final = {"temperature": 0.7, "top_p": 0.9, "seed": 7}
_NUM_REQUESTS: Final = 2
_EVENTS_WITHIN_S: Final = 10.0
_POLL_S: Final = 0.1


class Demo:
    """Asks, prints and checks: no text, a request that did not finish, or a missing event fails it."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock

    async def __call__(self, mesh: RunningMesh) -> None:
        """Raises PdmeshError for whatever did not go as it should."""
        for events in (await with_bus(mesh.nats_url, partial(self._run, mesh.url), say=self._console.say)).values():
            self._console.show(f"\n{render(build(events))}")

    async def _run(self, url: str, bus: Bus) -> dict[str, list[HandoffEvent]]:
        others = frozenset(by_handoff((await read_all(bus)).events))
        await self._ask(url)
        return await self._handoffs(bus, others)

    async def _ask(self, url: str) -> None:
        async with aiohttp.ClientSession() as session:
            client = ChatClient(session, url)
            limits = {"model": await client.model(), "max_tokens": _NUM_TOKENS, **_SAMPLING}
            messages = [{"role": "user", "content": _QUESTION}]
            await self._print("chat", _QUESTION, client.stream_chat(messages=messages, **limits))
            await self._print("completion", _OPENING, client.stream_completion(prompt=_OPENING, **limits))

    async def _print(self, kind: str, prompt: str, pieces: AsyncIterator[str]) -> None:
        self._console.show(f"\n{kind}: {prompt}\n> ", end="")
        num_characters = 0
        async for piece in pieces:
            num_characters += len(piece)
            self._console.show(piece, end="")
        self._console.show("")
        if not num_characters:
            raise PdmeshError(f"the {kind} request was answered without text")

    async def _handoffs(self, bus: Bus, others: frozenset[str]) -> dict[str, list[HandoffEvent]]:
        """The events of the requests just made. They are published in the background, so the last come a little later."""
        deadline = Deadline.after(self._clock, _EVENTS_WITHIN_S)
        while True:
            told_of = by_handoff((await read_all(bus)).events)
            handoffs = {name: events for name, events in told_of.items() if name not in others}
            told = [name for name, events in handoffs.items() if tells_all(events)]
            if len(told) >= _NUM_REQUESTS:
                return handoffs
            if deadline.passed:
                raise PdmeshError(
                    f"the event stream tells of {len(handoffs)} handoffs, and all of {len(told)}; expected"
                    f" {_NUM_REQUESTS} after {_EVENTS_WITHIN_S:.0f} s"
                )
            await self._clock.sleep(_POLL_S)
