"""One streamed completion, as a client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.mesh_probe import Probe
from tests.e2e.proc import DEADLINE_S


@dataclass
class Stream:
    """Its tokens as they come, and the error that it ended with, if it did."""

    token_ids: list[int] = field(default_factory=list)
    request_id: str = ""
    error: dict[str, Any] | None = None
    is_whole: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, num_tokens: int, timeout_s: float = DEADLINE_S) -> None:
        """Wait for so many tokens."""
        async with asyncio.timeout(timeout_s):
            while len(self.token_ids) < num_tokens:
                self.changed.clear()
                await self.changed.wait()

    async def read(
        self, probe: Probe, prompt: Sequence[int], max_tokens: int, *, timeout_s: float | None = None, **fields: Any
    ) -> None:
        """Ask for exactly `max_tokens` tokens of the model `tiny`, greedy unless `fields` say otherwise, and read to the end."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True, "ignore_eos": True, **fields}
        # None is the session's own, as it is without.
        timeout = None if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        async with probe.http.post(f"{probe.url}/v1/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                self.error = (await response.json())["error"]
                return
            async for line in response.content:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    self.is_whole = self.error is None
                elif text:
                    content = json.loads(text.removeprefix("data: "))
                    self.error = content.get("error", self.error)
                    for choice in content.get("choices", ()):
                        self.token_ids += choice["token_ids"]
                    self.request_id = str(content.get("id", self.request_id)).removeprefix("cmpl-")
                    self.changed.set()
