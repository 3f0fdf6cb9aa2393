"""One streamed completion over HTTP, as its client sees it: when it was sent, when its tokens came, and which they were."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any, Final, Self

import aiohttp
import msgspec

from common.runtime.clock import Clock
from contracts.errors import ErrorCode, PdmeshError

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_SHOWN_CHARS: Final = 300


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: token ids, and how many tokens are to come back."""

    token_ids: tuple[int, ...]
    num_output_tokens: int
    seed: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it went. Times are the host's monotonic clock in ns; `token_ns` has one entry for each token that came.

    `error` is empty when the stream ended with `[DONE]` and brought exactly the tokens that were asked for.
    """

    mode: str
    round: int
    place: int
    num_prompt_tokens: int
    sent_ns: int
    done_ns: int
    token_ids: tuple[int, ...]
    token_ns: tuple[int, ...]
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """From the request's first byte to its first token."""
        return (self.token_ns[0] - self.sent_ns) / 1e6

    @property
    def total_ms(self) -> float:
        """From the request's first byte to the end of the stream."""
        return (self.done_ns - self.sent_ns) / 1e6

    @property
    def inter_token_ms(self) -> float | None:
        """The mean time between tokens after the first; None for a single token."""
        if len(self.token_ns) < 2:
            return None
        return (self.token_ns[-1] - self.token_ns[0]) / 1e6 / (len(self.token_ns) - 1)


class CompletionClient:
    """Sends completions to one server over one session of its own. Close it by leaving it as a context."""

    def __init__(self, url: str, clock: Clock, *, timeout_s: float, concurrency: int = 1) -> None:
        self._url = url
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._concurrency = concurrency
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._concurrency)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def model(self) -> str:
        """The name of the model that is served. Raises PdmeshError."""
        try:
            async with self._opened.get(f"{self._url}/v1/models") as response:
                body = await response.text()
                if response.status != HTTPStatus.OK:
                    raise PdmeshError(_refusal(response.status, body))
                return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            raise PdmeshError(f"/v1/models: {error!r}", code=ErrorCode.PROTOCOL) from error

    async def complete(self, prompt: Prompt, *, model: str, mode: str, round_number: int, place: int) -> Sample:
        """Send one greedy request that ignores end-of-sequence tokens, and read its stream. A failure is in the sample."""
        body = {
            "model": model,
            "prompt": list(prompt.token_ids),
            "max_tokens": prompt.num_output_tokens,
            "temperature": 0.0,
            "seed": prompt.seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        token_ids: list[int] = []
        token_ns: list[int] = []
        error = ""
        sent_ns = self._clock.monotonic_ns()
        try:
            async for came in self._stream(body):
                token_ns += [self._clock.monotonic_ns()] * len(came)
                token_ids += came
        except (PdmeshError, aiohttp.ClientError, TimeoutError, ValueError) as failure:
            error = str(failure) or type(failure).__name__
        if not error and len(token_ids) != prompt.num_output_tokens:
            error = f"{len(token_ids)} tokens came; {prompt.num_output_tokens} were asked for"
        return Sample(
            mode=mode,
            round=round_number,
            place=place,
            num_prompt_tokens=len(prompt.token_ids),
            sent_ns=sent_ns,
            done_ns=self._clock.monotonic_ns(),
            token_ids=tuple(token_ids),
            token_ns=tuple(token_ns),
            error=error,
        )

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[Sequence[int]]:
        """The token ids of each chunk as it arrives."""
        async with self._opened.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != HTTPStatus.OK:
                raise PdmeshError(_refusal(response.status, await response.text()))
            async for line in response.content:
                if not line.startswith(_DATA):
                    continue
                data = line.removeprefix(_DATA).strip()
                if data == _DONE:
                    return
                yield token_ids_of(json.loads(data))
        raise PdmeshError("the stream ended without [DONE]", code=ErrorCode.PROTOCOL)

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise PdmeshError("the client is not open; the rule is: use it as a context")
        return self._session


def token_ids_of(chunk: Any) -> Sequence[int]:
    """The new token ids that one chunk of a stream carries. Raises PdmeshError for an error, or for what is no chunk."""
    if not isinstance(chunk, dict):
        raise PdmeshError(f"a chunk is {type(chunk).__name__}; the rule is: an object", code=ErrorCode.PROTOCOL)
    if "error" in chunk:
        raise PdmeshError(f"the stream broke off: {chunk['error']}"[:_SHOWN_CHARS])
    found: list[int] = []
    for choice in chunk.get("choices", ()):
        found += choice.get("token_ids") or ()
    return found


def _refusal(status: int, body: str) -> str:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = " ".join(body.split())
    return f"the server answered {status}: {message}"[:_SHOWN_CHARS]
