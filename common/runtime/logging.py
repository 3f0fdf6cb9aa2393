"""Log lines: one JSON object each on standard error, or readable text if that is a terminal.

Events are snake_case and past tense; the keys are those of the glossary (request_id, handoff_id, worker_id, incarnation,
role, phase, attempt, num_*_tokens, bytes, duration_ms, error_code). What people wrote to a model is never logged. A line that
is written for a request has its `trace_id` and `span_id` (`common.runtime.trace`).
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, BinaryIO, Final, get_args

import orjson
import structlog

from common.runtime.setting_types import LogLevel
from common.runtime.trace import current_trace

LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)

_WITHHELD_KEYS: Final = frozenset({"prompt", "prompts", "messages", "text", "content", "token_ids"})


def configure_logging(
    service: str, *, level: str = "info", stream: BinaryIO | None = None, **fields: Any
) -> structlog.typing.FilteringBoundLogger:
    """Send this process's log lines to `stream` (standard error), and return its logger.

    `service` and `fields` (worker_id, incarnation) stand on every line. Libraries that use `logging` come out alike,
    from "warning" on. Call it once, first of all. Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"log_level: {level!r} is not allowed; the rule is: one of {', '.join(LEVELS)}")
    readable = stream is None and sys.stderr.isatty()
    sink = sys.stderr.buffer if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _name_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _withhold,
    ]
    if readable:
        processors.append(structlog.dev.ConsoleRenderer(colors=True))
        factory: Any = structlog.PrintLoggerFactory(sys.stderr)
    else:
        # Local variables of a traceback could be what people wrote.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors += [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
        factory = structlog.BytesLoggerFactory(sink)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(service=service, **fields)
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _Forwarder)]:
        root.removeHandler(handler)
    root.addHandler(_Forwarder(logger))
    root.setLevel(max(number, logging.WARNING))
    return logger


def set_level(level: str) -> None:
    """Let this process's log lines begin at another level from now on. Raises ValueError for an unknown one."""
    if level not in LEVELS:
        raise ValueError(f"log_level: {level!r} is not allowed; the rule is: one of {', '.join(LEVELS)}")
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    logging.getLogger().setLevel(max(number, logging.WARNING))


class _Forwarder(logging.Handler):
    """Turns the records of libraries into log lines of ours."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._logger.log(
            record.levelno,
            "library_logged",
            library=record.name,
            message=record.getMessage(),
            **({"exc_info": error} if error else {}),
        )


def _name_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    trace = current_trace()
    if trace is not None:
        event.setdefault("trace_id", trace.trace_id)
        event.setdefault("span_id", trace.span_id)
    return event


def _withhold(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    for key in _WITHHELD_KEYS & event.keys():
        event[key] = "(withheld)"
    return event


def _to_json(value: Any, **_options: Any) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
