"""The requests that the smoke test sends: OpenAI's own client for chat, plain HTTP for the rest."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from compose.problem import ComposeError

MODEL: Final = "tiny"
_TIMEOUT_S: Final = 60.0
_STATUS_TIMEOUT_S: Final = 5.0


class Client:
    """A client of one router."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._address = urlsplit(url).netloc

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; status 0 if nobody answers."""
        connection = http.client.HTTPConnection(self._address, timeout=_STATUS_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """The status of a GET; 0 if nobody answers."""
        return self.get(path)[0]

    def complete(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[str, tuple[int, ...]]:
        """Greedily continue a prompt by `num_tokens`: the request's id and the tokens. Raises ComposeError."""
        body = {
            "model": MODEL,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ComposeError(f"a completion was not answered: {error!r}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ComposeError(f"a completion was answered with {answer.status}: {text}")
        completion = json.loads(text)
        return _request_id(completion["id"]), tuple(completion["choices"][0]["token_ids"])

    def chat(self, text: str, num_tokens: int, on_first: Callable[[], object] = lambda: None) -> tuple[str, str, int]:
        """Stream a chat answer: the request's id, the text, and how many tokens it had. Raises ComposeError.

        `on_first` is called when the first piece of text has come.
        """
        from openai import OpenAI, OpenAIError

        client = OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S)
        pieces: list[str] = []
        request_id = finish_reason = ""
        num_streamed = 0
        extra: dict[str, Any] = {"ignore_eos": True}
        try:
            with (
                client,
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=num_tokens,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=extra,
                ) as stream,
            ):
                for chunk in stream:
                    request_id = _request_id(chunk.id)
                    for choice in chunk.choices:
                        if choice.delta.content:
                            pieces.append(choice.delta.content)
                            if len(pieces) == 1:
                                on_first()
                        finish_reason = choice.finish_reason or finish_reason
                    if chunk.usage is not None:
                        num_streamed = chunk.usage.completion_tokens
        except OpenAIError as error:
            raise ComposeError(f"a chat request failed: {error!r}") from error
        if finish_reason != "length":
            raise ComposeError(f"a chat answer ended by {finish_reason or 'nothing'} after {num_streamed} tokens")
        return request_id, "".join(pieces), num_streamed


def _request_id(answer_id: str) -> str:
    return answer_id.partition("-")[2]
