"""The one hierarchy of errors: a code, whether a retry elsewhere may help, and the HTTP status, in one table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

MAX_ERROR_CHARS: Final = 2000
MAX_PARAM_CHARS: Final = 200


class ErrorCode(StrEnum):
    """Stable names of everything that can go wrong with a request. They travel in replies, frames, events and HTTP bodies."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    PROMPT_TOO_LONG = "prompt_too_long"
    CONTEXT_LENGTH = "context_length_exceeded"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED = "unsupported_parameter"
    OVERLOADED = "overloaded"
    NO_ROUTE = "no_route"
    DRAINING = "draining"
    INCARNATION_CHANGED = "incarnation_changed"
    STALE_FENCE = "stale_fence"
    UNKNOWN_HANDOFF = "unknown_handoff"
    DUPLICATE = "duplicate"
    INCOMPATIBLE_WORKERS = "incompatible_workers"
    TRANSFER_FAILED = "transfer_failed"
    WORKER_LOST = "worker_lost"
    WORKER_FAILED = "worker_failed"
    PREEMPTED = "preempted"
    CACHE_CORRUPT = "cache_corrupt"
    BUS_UNAVAILABLE = "bus_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol_error"
    INTERNAL = "internal_error"


class ErrorRule(msgspec.Struct, frozen=True):
    """What a code means to a caller."""

    http_status: int
    retryable: bool


ERROR_RULES: Final[dict[ErrorCode, ErrorRule]] = {
    ErrorCode.INVALID_REQUEST: ErrorRule(400, retryable=False),
    ErrorCode.MODEL_NOT_FOUND: ErrorRule(404, retryable=False),
    ErrorCode.PROMPT_TOO_LONG: ErrorRule(413, retryable=False),
    ErrorCode.CONTEXT_LENGTH: ErrorRule(400, retryable=False),
    ErrorCode.BODY_TOO_LARGE: ErrorRule(413, retryable=False),
    ErrorCode.UNSUPPORTED: ErrorRule(400, retryable=False),
    ErrorCode.OVERLOADED: ErrorRule(429, retryable=True),
    ErrorCode.NO_ROUTE: ErrorRule(503, retryable=True),
    ErrorCode.DRAINING: ErrorRule(503, retryable=True),
    ErrorCode.INCARNATION_CHANGED: ErrorRule(503, retryable=True),
    ErrorCode.STALE_FENCE: ErrorRule(503, retryable=True),
    ErrorCode.UNKNOWN_HANDOFF: ErrorRule(404, retryable=False),
    ErrorCode.DUPLICATE: ErrorRule(409, retryable=False),
    ErrorCode.INCOMPATIBLE_WORKERS: ErrorRule(503, retryable=True),
    ErrorCode.TRANSFER_FAILED: ErrorRule(503, retryable=True),
    ErrorCode.WORKER_LOST: ErrorRule(503, retryable=True),
    ErrorCode.WORKER_FAILED: ErrorRule(500, retryable=True),
    ErrorCode.PREEMPTED: ErrorRule(503, retryable=True),
    ErrorCode.CACHE_CORRUPT: ErrorRule(500, retryable=False),
    ErrorCode.BUS_UNAVAILABLE: ErrorRule(503, retryable=True),
    ErrorCode.DEADLINE_EXCEEDED: ErrorRule(504, retryable=False),
    ErrorCode.CANCELLED: ErrorRule(499, retryable=False),
    ErrorCode.PROTOCOL: ErrorRule(500, retryable=False),
    ErrorCode.INTERNAL: ErrorRule(500, retryable=False),
}


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels. `param` names the request field at fault, when there is one.

    A message of more than `MAX_ERROR_CHARS` is cut, whoever wrote it: errors travel inside of messages that have a bound.
    """

    code: ErrorCode
    message: str
    param: str | None = None

    def __post_init__(self) -> None:
        if len(self.message) > MAX_ERROR_CHARS:
            msgspec.structs.force_setattr(self, "message", f"{self.message[: MAX_ERROR_CHARS - 4]} ...")
        if self.param is not None and len(self.param) > MAX_PARAM_CHARS:
            msgspec.structs.force_setattr(self, "param", self.param[:MAX_PARAM_CHARS])

    @property
    def rule(self) -> ErrorRule:
        """HTTP status and retryability of this error's code."""
        return ERROR_RULES[self.code]


class PdmeshError(Exception):
    """Base of every error that pdmesh raises on purpose."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str, *, code: ErrorCode | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def info(self) -> ErrorInfo:
        """This error as it travels."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> PdmeshError:
        """The exception for an error that arrived in a reply or a frame."""
        return PdmeshError(info.message, code=info.code, param=info.param)


class InvalidValueError(PdmeshError):
    """A value breaks a rule: the text names the field, the value and the rule."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, *, field: str, value: object, rule: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = f"{shown[:117]}..."
        super().__init__(f"{field}: {shown} is not allowed; the rule is: {rule}", param=field)
        self.field = field
        self.value = value
        self.rule_text = rule


class CodecError(PdmeshError):
    """Bytes that are not the message that they should be."""

    code = ErrorCode.PROTOCOL
