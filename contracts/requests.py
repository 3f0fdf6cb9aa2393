"""How a request is asked for, by whom it is served, and how its tokens come back."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from contracts.codec import Versioned
from contracts.errors import ErrorInfo
from contracts.ids import Token
from contracts.numbers import Milliseconds, Whole


class FinishReason(StrEnum):
    """Why a stream of tokens ended well."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when they end.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. Random numbers are counter-based on (`seed`, position), so
    the same values give the same tokens on whichever worker. `max_tokens` is always set: a default has been applied.
    """

    max_tokens: Whole
    seed: Whole
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Whole = 0
    min_tokens: Whole = 0
    ignore_eos: bool = False


class WorkerRef(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one worker."""

    worker_id: Token
    incarnation: Token


class DisaggregatedRoute(msgspec.Struct, frozen=True, kw_only=True, tag="disaggregated"):
    """Prefill on one worker, decode on another."""

    prefill: WorkerRef
    decode: WorkerRef


class MixedRoute(msgspec.Struct, frozen=True, kw_only=True, tag="mixed"):
    """Prefill and decode on one worker: no transfer."""

    mixed: WorkerRef


Route: TypeAlias = DisaggregatedRoute | MixedRoute


class PromptFrame(Versioned, frozen=True, kw_only=True, tag="prompt_frame"):
    """A piece of a prompt, sent by the router to the worker that will compute it (verb `prompt`), before `SubmitRequest`.

    `ids_b64` is base64 of little-endian u32 token ids. Frames of one handoff may arrive in any order and more than once.
    """

    handoff_id: Token
    index: Whole
    num_frames: Whole
    num_prompt_tokens: Whole
    prompt_hash: str
    timeout_ms: Milliseconds
    ids_b64: str


class SubmitRequest(Versioned, frozen=True, kw_only=True, tag="submit_request"):
    """The router asks the broker to serve one attempt of a request.

    The last `num_delivered_tokens` of the prompt are tokens that an earlier attempt has generated and the client has: the stream
    goes on behind them. `sampling.max_tokens` and `min_tokens` count what is left. With the end of the lease of
    `router_incarnation` nobody waits any more. `previous_error` is what the attempt before came to, as the router saw it.
    """

    handoff_id: Token
    request_id: Token
    attempt: Whole
    router_id: Token
    route: Route
    num_prompt_tokens: Whole
    prompt_hash: str
    sampling: SamplingParams
    timeout_ms: Milliseconds
    num_delivered_tokens: Whole = 0
    router_incarnation: Token | None = None
    previous_error: ErrorInfo | None = None


class CancelRequest(Versioned, frozen=True, kw_only=True, tag="cancel_request"):
    """The router tells the broker that nobody waits for a request any more: it had `num_tokens` of it by then.

    With a `finish_reason` it is not given up but complete: the router saw its end, as with a stop string.
    """

    handoff_id: Token
    reason: str
    num_tokens: Whole = 0
    finish_reason: FinishReason | None = None


class CancelWork(Versioned, frozen=True, kw_only=True, tag="cancel_work"):
    """A hint to a worker to stop computing. It never frees granted memory: only a release does."""

    handoff_id: Token


class Ping(Versioned, frozen=True, kw_only=True, tag="ping"):
    """The router asks whether a broker leads (verb `ping`)."""


class Pong(Versioned, frozen=True, kw_only=True, tag="pong"):
    """It is there. `max_timeout_ms` is the longest time that it lets a request have."""

    broker_id: Token
    max_timeout_ms: Milliseconds


class Accepted(Versioned, frozen=True, kw_only=True, tag="accepted"):
    """The callee took the request over. Never the result of the work."""

    handoff_id: Token


class Refused(Versioned, frozen=True, kw_only=True, tag="refused"):
    """The callee did not, and nothing was changed."""

    handoff_id: Token
    error: ErrorInfo


Answer: TypeAlias = Accepted | Refused


class TokenFrame(Versioned, frozen=True, kw_only=True, tag="token_frame", omit_defaults=True):
    """Some tokens of a request on their way to the router.

    `index` is the position among the generated tokens of the first of `token_ids`; frames may repeat or arrive late, the
    router keeps a contiguous stream. The last frame has `final` set, with `num_tokens` generated in all and either a
    `finish_reason` or an `error`. Tokens of earlier attempts count: those of an attempt begin at its `num_delivered_tokens`.
    """

    handoff_id: Token
    request_id: Token
    attempt: Whole
    index: Whole
    token_ids: tuple[Whole, ...] = ()
    final: bool = False
    num_tokens: Whole = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: Whole = 0


class ReplayTokens(Versioned, frozen=True, kw_only=True, tag="replay_tokens", omit_defaults=True):
    """The router asks for what it may have missed: the tokens of an attempt from `index` on, and its end.

    A worker (verb `replay`) answers with one frame of what it has told so far, maybe of nothing; it knows a stream until its
    deadline, also after its end. The broker (verb `outcome`) answers with the end of a handoff that is over, or with `Accepted`
    while it is not; a worker asks it, too, about a prompt that nobody has asked to run. Both refuse a handoff that they do not know.
    With `ended` the router has the end and will not ask again: what was kept for it goes.
    """

    handoff_id: Token
    index: Whole
    ended: bool = False


ReplayAnswer: TypeAlias = TokenFrame | Accepted | Refused
