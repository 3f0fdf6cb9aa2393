"""What is counted and told of one HTTP request: its trace, its metrics, and one line in the log at its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.trace import within
from contracts.errors import PdmeshError
from contracts.requests import FinishReason
from contracts.trace import TRACEPARENT, TraceContext
from services.router.answer_headers import trace_of
from services.router.http_errors import ERROR_CODE_KEY, REQUEST_ID_KEY
from services.router.metrics import RouterMetrics

CLIENT_GONE: Final = "499"
_OK: Final = "200"
_ENDPOINTS: Final = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/models": "models",
    "/v1/models/{name}": "models",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_GENERATING: Final = frozenset({"completions", "chat"})
_PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
_OTHER: Final = "other"


@dataclass(slots=True)
class _Choice:
    first_at: float = 0.0
    last_at: float = 0.0
    num_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def seconds_a_token(self) -> float | None:
        """Between tokens, on average; None with fewer than two."""
        return (self.last_at - self.first_at) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(slots=True, kw_only=True)
class Account:
    """The account of one HTTP request. Times are monotonic seconds; those that are measured begin when the body was there."""

    endpoint: str
    metrics: RouterMetrics
    clock: Clock
    since: float
    streamed: bool = False
    status: str = "500"
    error_code: str | None = None
    request_id: str = ""
    num_prompt_tokens: int = 0
    prepared_at: float | None = None
    choices: list[_Choice] = field(default_factory=list)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def body_read(self) -> None:
        """Begin to measure: what came before was the client's time."""
        self.since = self.clock.monotonic()

    def prepared(self, request_id: str, *, num_prompt_tokens: int, num_choices: int, streamed: bool) -> None:
        """Note that the request is valid, tokenized and about to be sent out; `request_id` is that of its first choice."""
        self.prepared_at = self.clock.monotonic()
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.streamed = streamed
        self.choices = [_Choice() for _ in range(num_choices)]
        self.metrics.prompt_tokens.inc(num_prompt_tokens)
        self.metrics.request_prompt_tokens.labels(self.endpoint).observe(num_prompt_tokens)
        self.metrics.prepare.observe(self.prepared_at - self.since)

    def delivered(self, number: int, num_tokens: int, finish_reason: FinishReason | None) -> None:
        """Note tokens that go to the client now, and whether they were the last ones of their choice."""
        choice = self.choices[number]
        if num_tokens:
            now = self.clock.monotonic()
            if choice.num_tokens == 0:
                choice.first_at = now
                self.metrics.first_token.labels(self.endpoint).observe(now - self.since)
            else:
                between = self.metrics.between_tokens.labels(self.endpoint)
                for _ in range(num_tokens):  # what came in one frame shares the time since the frame before
                    between.observe((now - choice.last_at) / num_tokens)
            choice.last_at = now
            choice.num_tokens += num_tokens
            self.metrics.tokens.inc(num_tokens)
        if finish_reason is not None:
            choice.finish_reason = finish_reason

    def broke_off(self, error: PdmeshError) -> None:
        """Note an error that was told inside an answer that had begun."""
        self.status = str(error.info.rule.http_status)
        self.error_code = str(error.code)

    def close(self, log: Log, *, client_request_id: str) -> None:
        """Count the request, and write its line if it was one to generate."""
        seconds = self.clock.monotonic() - self.since
        self.metrics.requests.labels(self.endpoint, self.status).inc()
        if self.error_code is not None:
            self.metrics.errors.labels(self.endpoint, self.error_code).inc()
        if self.status == _OK:
            self.metrics.total.labels(self.endpoint).observe(seconds)
        for choice in self.choices:
            self._close_choice(choice)
        if self.endpoint not in _GENERATING:
            return
        begun = [choice for choice in self.choices if choice.num_tokens]
        between = [pause for choice in begun if (pause := choice.seconds_a_token) is not None]
        log.info(
            "request_finished",
            request_id=self.request_id,
            client_request_id=client_request_id,
            endpoint=self.endpoint,
            stream=self.streamed,
            status=self.status,
            error_code=self.error_code,
            num_choices=len(self.choices),
            finish_reasons=[str(choice.finish_reason) for choice in self.choices if choice.finish_reason is not None],
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            prepare_ms=None if self.prepared_at is None else _ms(self.prepared_at - self.since),
            ttft_ms=_ms(min(choice.first_at for choice in begun) - self.since) if begun else None,
            tpot_ms=_ms(sum(between) / len(between)) if between else None,
            duration_ms=_ms(seconds),
        )

    def _close_choice(self, choice: _Choice) -> None:
        pause = choice.seconds_a_token
        if pause is not None:
            self.metrics.per_token.labels(self.endpoint).observe(pause)
        if choice.num_tokens:
            self.metrics.output_tokens.labels(self.endpoint).observe(choice.num_tokens)
        given_up = "cancelled" if self.status == CLIENT_GONE else "error"
        reason = given_up if choice.finish_reason is None else str(choice.finish_reason)
        self.metrics.choices.labels(self.endpoint, reason).inc()


ACCOUNT_KEY: Final = web.RequestKey("account", Account)


def accounting_middleware(metrics: RouterMetrics, clock: Clock, log: Log) -> Middleware:
    """Return the outermost middleware: it sees what every request came to, refusals and clients that left included.

    The handlers inside work within the request's trace, of which the router is a hop. Answers name it.
    """

    @web.middleware
    async def account_for(request: web.Request, handler: Handler) -> web.StreamResponse:
        trace = trace_of(request)
        endpoint = _endpoint(request)
        if endpoint is None:
            return _naming(trace, await handler(request))
        account = request[ACCOUNT_KEY] = Account(
            endpoint=endpoint, metrics=metrics, clock=clock, since=clock.monotonic()
        )
        with within(trace):
            try:
                response = await handler(request)
            except (asyncio.CancelledError, ConnectionResetError):
                account.status = CLIENT_GONE
                raise
            else:
                if account.error_code is None:
                    account.status = str(response.status)
                    account.error_code = request.get(ERROR_CODE_KEY)
                return _naming(trace, response)
            finally:
                account.close(log, client_request_id=request.get(REQUEST_ID_KEY, ""))

    return account_for


def _endpoint(request: web.Request) -> str | None:
    """A name from a short list, whatever paths clients ask for; None for what is asked by machines every few seconds."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    return None if path in _PROBES else _ENDPOINTS.get(path, _OTHER)


def _naming(trace: TraceContext, response: web.StreamResponse) -> web.StreamResponse:
    """The response with the name of its trace; a stream has named it when it began."""
    if not response.prepared:
        response.headers[TRACEPARENT] = trace.traceparent
    return response


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)
