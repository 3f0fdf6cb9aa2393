"""A small client of the OpenAI API, for the demo: what it receives is handed on piece by piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from contracts.errors import ErrorCode, PdmeshError

_TIMEOUT_S: Final = 60.0
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class ChatClient:
    """Talks to one server. Raises PdmeshError with the server's own words when it refuses, fails, or goes silent."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)

    async def model(self) -> str:
        """The name of the model that is served."""
        try:
            async with self._session.get(f"{self._url}/v1/models", timeout=self._timeout) as response:
                body = await response.text()
                if response.status != HTTPStatus.OK:
                    raise _refusal(response.status, body)
                return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            raise PdmeshError(f"/v1/models: {error!r}", code=ErrorCode.PROTOCOL) from error

    async def stream_chat(self, **body: Any) -> AsyncIterator[str]:
        """The pieces of the answer's text as they arrive."""
        async for chunk in self._stream("/v1/chat/completions", body):
            for choice in chunk.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""

    async def stream_completion(self, **body: Any) -> AsyncIterator[str]:
        """The pieces of the text that follows the prompt."""
        async for chunk in self._stream("/v1/completions", body):
            for choice in chunk.get("choices", ()):
                yield choice.get("text") or ""

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        request = {**body, "stream": True}
        try:
            async with self._session.post(f"{self._url}{path}", json=request, timeout=self._timeout) as response:
                if response.status != HTTPStatus.OK:
                    raise _refusal(response.status, await response.text())
                async for line in response.content:
                    if not line.startswith(_DATA):
                        continue
                    data = line.removeprefix(_DATA).strip()
                    if data == _DONE:
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise _refusal(response.status, data.decode())
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PdmeshError(f"{path}: {error!r}", code=ErrorCode.PROTOCOL) from error
        raise PdmeshError(f"{path}: the stream ended without [DONE]", code=ErrorCode.PROTOCOL)


def _refusal(status: int, body: str) -> PdmeshError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = " ".join(body.split())
    return PdmeshError(f"the server answered {status}: {message}")
