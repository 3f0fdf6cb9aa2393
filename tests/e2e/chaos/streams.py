"""Concurrent streams over HTTP, and how each of them ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import aiohttp
import msgspec

from common.runtime.clock import SystemClock
from tests.e2e.chaos.cases import Case

REQUEST_S: Final = 25.0
"""What the router gives each request, unless a run says otherwise."""
STRICT_REQUEST_S: Final = 60.0
"""For streams that must go on: the only worker of a role may be frozen for 9 s, and then have to start anew, twice."""
SLACK_S: Final = 20.0
"""How much later a client may see the end: a router that stands still tells nobody until it wakes."""
_RETRY_S: Final = 0.5


class Ending(StrEnum):
    """How a stream ended for its client."""

    WHOLE = "whole"
    ERROR = "error"
    """With an error that names itself."""
    CUT = "cut"
    """The connection broke, or ended without a word."""
    LATE = "late"
    """It did not end."""


class Outcome(msgspec.Struct, kw_only=True):
    """One stream. Times are monotonic seconds."""

    case: Case
    started_at: float
    ended_at: float = 0.0
    ending: Ending = Ending.CUT
    code: str = ""
    token_ids: list[int] = []

    @property
    def is_right(self) -> bool:
        """Whether what came is what had to come: all of it, or, for one that did not end well, its beginning."""
        known = list(self.case.expected)
        return self.token_ids == (known if self.ending is Ending.WHOLE else known[: len(self.token_ids)])


class Load:
    """Keeps `num_streams` streams open until it is stopped; what they said is in `outcomes`."""

    def __init__(
        self,
        url: str,
        model: str,
        cases: Sequence[Case],
        *,
        num_streams: int,
        seed: int,
        request_s: float = REQUEST_S,
    ) -> None:
        self._url = url
        self._model = model
        self._cases = cases
        self._num_streams = num_streams
        self._seed = seed
        self._request_s = request_s
        self._clock = SystemClock()
        self._stopping = False
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Returns once `stop` was called and the last stream has ended."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._num_streams):
                group.create_task(self._streams(session, random.Random(f"{self._seed}.{number}")), name=f"s{number}")

    def stop(self) -> None:
        """Begin nothing new."""
        self._stopping = True

    async def each_once(self) -> list[Outcome]:
        """Every case once, as many at the same time as there are streams; how each ended, in the order of the cases."""
        gate = asyncio.Semaphore(self._num_streams)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)

        async def ask(session: aiohttp.ClientSession, case: Case) -> Outcome:
            async with gate:
                return await self.ask(session, case)

        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            asked = [group.create_task(ask(session, case), name=case.name) for case in self._cases]
        return [task.result() for task in asked]

    async def _streams(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while not self._stopping:
            outcome = await self.ask(session, rng.choice(self._cases))
            self.outcomes.append(outcome)
            if outcome.ending is not Ending.WHOLE:
                await self._clock.sleep(_RETRY_S)

    async def ask(self, session: aiohttp.ClientSession, case: Case) -> Outcome:
        """One stream to its end, whatever that is."""
        outcome = Outcome(case=case, started_at=self._clock.monotonic(), token_ids=[])
        try:
            async with asyncio.timeout(self._request_s + SLACK_S):
                await self._read(session, outcome)
        except TimeoutError:
            outcome.ending = Ending.LATE
        except (aiohttp.ClientError, OSError) as error:
            outcome.code = type(error).__name__
        outcome.ended_at = self._clock.monotonic()
        return outcome

    async def _read(self, session: aiohttp.ClientSession, outcome: Outcome) -> None:
        body = outcome.case.body(self._model)
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                self._failed(outcome, (await response.json()).get("error"))
                return
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    outcome.ending = outcome.ending if outcome.ending is Ending.ERROR else Ending.WHOLE
                elif text and not text.startswith(":"):
                    content = json.loads(text)
                    if "error" in content:
                        self._failed(outcome, content["error"])
                    for choice in content.get("choices", ()):
                        outcome.token_ids += choice["token_ids"]

    def _failed(self, outcome: Outcome, error: dict[str, Any] | None) -> None:
        outcome.ending = Ending.ERROR
        outcome.code = str((error or {}).get("code"))
