"""The HTTP paths: bodies are read and checked here, and handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import orjson
from aiohttp import web

from common.runtime.admin import NOT_READY, AdminRoutes
from common.runtime.lifecycle import Lifecycle, State
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from services.router.account import ACCOUNT_KEY
from services.router.admission import Admission
from services.router.body_reader import BodyReader
from services.router.completing import Completer
from services.router.core.answers import body
from services.router.core.bodies import decode_body
from services.router.core.parameters import check_token_ids, read_messages, read_parameters, read_prompts
from services.router.core.readiness import missing
from services.router.fleet import Fleet
from services.router.model_directory import Model
from services.router.settings import RouterSettings
from services.router.tokenizing import Tokenizing

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The handlers of all paths."""

    settings: RouterSettings
    model: Model
    tokenizing: Tokenizing
    fleet: Fleet
    admission: Admission
    bodies: BodyReader
    completer: Completer
    lifecycle: Lifecycle
    admin: AdminRoutes
    started_at: int
    """When the router started: seconds since 1970 UTC."""

    def routes(self) -> list[web.RouteDef]:
        """Return what to add to an application's router. /ready is not the usual one: it names what the mesh lacks."""
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.one_model),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/ready", self.ready),
            *(route for route in self.admin.routes() if route.path != "/ready"),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue prompts."""
        asked = await self._read_admitted(request, CompletionRequest)
        self._check_model(asked.model)
        ask = read_parameters(asked)
        prompts = read_prompts(asked.prompt, most=self.settings.max_choices)

        async def encode() -> Sequence[tuple[int, ...]]:
            return await self.tokenizing.encode_prompts(prompts)

        return await self.completer.answer(request, ask, encode, num_prompts=len(prompts), chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer in a conversation."""
        asked = await self._read_admitted(request, ChatRequest)
        self._check_model(asked.model)
        ask = read_parameters(asked)
        messages = read_messages(asked.messages)

        async def encode() -> Sequence[tuple[int, ...]]:
            return [await self.tokenizing.encode_chat(messages, arguments=asked.chat_template_kwargs)]

        return await self.completer.answer(request, ask, encode, num_prompts=1, chat=True)

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model."""
        return _json(ModelList(data=[self._card()]))

    async def one_model(self, request: web.Request) -> web.Response:
        """Describe the one model."""
        self._check_model(request.match_info["name"])
        return _json(self._card())

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the ids of a text or of a conversation."""
        asked = await self._read(request, TokenizeRequest)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidValueError(field="prompt", value=asked.prompt, rule="either prompt or messages")
        if asked.messages is not None:
            ids = await self.tokenizing.encode_chat(
                read_messages(asked.messages),
                arguments=asked.chat_template_kwargs,
                add_generation_prompt=asked.add_generation_prompt is not False,
            )
        else:
            (ids,) = await self.tokenizing.encode_prompts(
                (asked.prompt or "",), add_special_tokens=asked.add_special_tokens is not False
            )
        limit = self.model.max_sequence_tokens
        return _json(TokenizeAnswer(tokens=list(ids), count=len(ids), max_model_len=limit))

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of ids."""
        asked = await self._read(request, DetokenizeRequest)
        self._check_model(asked.model)
        if asked.tokens:
            check_token_ids(tuple(asked.tokens), vocab_size=self.model.vocabulary.size, field="tokens")
        return _json(DetokenizeAnswer(prompt=await self.tokenizing.decode(asked.tokens)))

    async def ready(self, _request: web.Request) -> web.Response:
        """Say whether requests can be served now, and what is missing if not."""
        lacking: list[str] = []
        if self.lifecycle.state is not State.READY or self.admission.draining:
            lacking.append(f"the router is {State.DRAINING if self.admission.draining else self.lifecycle.state}")
        if not self.fleet.is_connected:
            lacking.append("the router has no connection to the bus")
        if broker_problem := await self.fleet.broker_problem(self.settings.request_timeout_s):
            lacking.append(broker_problem)
        lacking += missing(self.fleet.view(), model=self.model.name, expected=self.settings.expected_workers)
        state = NOT_READY if lacking and self.lifecycle.state is State.READY else self.lifecycle.state
        answer = {"state": state, "missing": lacking}
        status = 503 if lacking else 200
        return web.Response(status=status, body=orjson.dumps(answer), content_type="application/json")

    def _card(self) -> ModelCard:
        return ModelCard(id=self.model.name, created=self.started_at, max_model_len=self.model.max_sequence_tokens)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            message = f"model: {name[:200]!r} is not served; the rule is: {self.model.name!r}"
            raise PdmeshError(message, code=ErrorCode.MODEL_NOT_FOUND, param="model")

    async def _read_admitted(self, request: web.Request, kind: type[T]) -> T:
        """Return the body. A router that is full says so before it reads."""
        self.admission.check()
        return await self._read(request, kind)

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        async with self.bodies.read(request) as data:
            request[ACCOUNT_KEY].body_read()
        return decode_body(data, kind)


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=body(answer), content_type="application/json")
