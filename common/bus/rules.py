"""What the bus can carry: the same checks for every adapter, before anything is sent. Pure."""

import functools
import re
from typing import Final

from common.bus.errors import InvalidSubject, PayloadTooLarge, StorageRefused
from common.bus.port import BucketConfig, Headers, StreamConfig
from contracts.codec import MAX_MESSAGE_BYTES
from contracts.subjects import RPC_FILTER

_TOKEN: Final = re.compile(r"[^\s.*>\x00-\x1f\x7f]+")
_SUBJECT: Final = re.compile(rf"{_TOKEN.pattern}(\.{_TOKEN.pattern})*")
_KEY: Final = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_NAME: Final = re.compile(r"[A-Z0-9_]+")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")

_MAX_HISTORY: Final = 64
_MIN_TTL_S: Final = 0.1

REQUEST_FILTERS: Final = (RPC_FILTER, "_INBOX.>", "$JS.API.>")
"""Where requests and their answers travel: a stream that kept these would answer in the place of whoever was asked."""

_HEADERS_FRAME_BYTES: Final = len(b"NATS/1.0\r\n\r\n")
_HEADER_FRAME_BYTES: Final = len(b": \r\n")


def check_subject(subject: str) -> None:
    """Raise InvalidSubject unless it is dot-separated tokens without wildcards and white space."""
    if not _is_plain(subject) and not _SUBJECT.fullmatch(subject):
        raise InvalidSubject(
            f"subject: {subject!r} is not allowed; the rule is: tokens separated by dots, no wildcards"
        )


def _is_plain(subject: str) -> bool:
    """Whether a subject is fine at first sight, as nearly all are: the expression costs three times as much."""
    return (
        subject.isascii()
        and subject.isprintable()
        and " " not in subject
        and "*" not in subject
        and ">" not in subject
        and ".." not in subject
        and subject.strip(".") == subject != ""
    )


def check_pattern(pattern: str) -> None:
    """Raise InvalidSubject unless each token is plain, `*`, or, at the end, `>`."""
    tokens = pattern.split(".")
    for index, part in enumerate(tokens):
        last = index == len(tokens) - 1
        if not (_TOKEN.fullmatch(part) or part == "*" or (part == ">" and last)):
            rule = "tokens separated by dots; a token may be *, the last one >"
            raise InvalidSubject(f"pattern: {pattern!r} is not allowed; the rule is: {rule}")


def check_key(key: str) -> None:
    """Raise InvalidSubject unless it can be a key of a bucket."""
    if not _KEY.fullmatch(key):
        raise InvalidSubject(f"key: {key!r} is not allowed; the rule is: dot-separated tokens of [-/_=a-zA-Z0-9]")


def check_name(name: str) -> None:
    """Raise InvalidSubject unless it can name a bucket or a stream."""
    if not _NAME.fullmatch(name):
        raise InvalidSubject(f"name: {name!r} is not allowed; the rule is: one or more of [A-Z0-9_]")


def check_bucket(config: BucketConfig) -> None:
    """Raise InvalidSubject for a bad name, StorageRefused for options that no server can honour."""
    check_name(config.name)
    if not 1 <= config.history <= _MAX_HISTORY:
        raise StorageRefused(f"history: {config.history} is not allowed; the rule is: 1 to {_MAX_HISTORY}")
    if config.ttl_s != 0 and config.ttl_s < _MIN_TTL_S:
        raise StorageRefused(f"ttl_s: {config.ttl_s} is not allowed; the rule is: 0, or at least {_MIN_TTL_S}")


def check_stream(config: StreamConfig) -> None:
    """Raise InvalidSubject for a bad name or pattern, StorageRefused for a stream that would keep nothing."""
    check_name(config.name)
    for pattern in config.subjects:
        check_pattern(pattern)
    if not config.subjects:
        raise StorageRefused(f"subjects: {config.subjects} is not allowed; the rule is: one pattern or more")
    for pattern in config.subjects:
        for requests in REQUEST_FILTERS:
            if overlaps(pattern, requests):
                rule = f"a stream keeps nothing of {requests}, where requests travel"
                raise StorageRefused(f"subjects: {pattern!r} is not allowed; the rule is: {rule}")


def check_message(data: bytes, headers: Headers | None) -> None:
    """Raise PayloadTooLarge if payload and headers together are over the cap, InvalidSubject for a bad header."""
    size = len(data)
    if headers:
        size += _HEADERS_FRAME_BYTES
        for name, value in headers.items():
            is_printable = value.isascii() and value.isprintable()
            if not is_printable or value != value.strip() or not _is_header_name(name):
                raise InvalidSubject(
                    f"header {name!r}: {value!r} is not allowed; the rule is: printable ASCII, no space at its ends"
                )
            size += len(name) + len(value) + _HEADER_FRAME_BYTES
    if size > MAX_MESSAGE_BYTES:
        raise PayloadTooLarge(f"message of {size} bytes with its headers; the rule is: at most {MAX_MESSAGE_BYTES}")


@functools.lru_cache(maxsize=256)
def _is_header_name(name: str) -> bool:
    return _HEADER_NAME.fullmatch(name) is not None


@functools.lru_cache(maxsize=4096)
def matches(pattern: str, subject: str) -> bool:
    """Whether a valid pattern covers a subject: `*` stands for one token, a final `>` for one or more."""
    wanted = pattern.split(".")
    given = subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or part not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def overlaps(one: str, other: str) -> bool:
    """Whether a subject exists that both valid patterns cover."""
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if ">" in (mine, theirs):
            return True
        if "*" not in (mine, theirs) and mine != theirs:
            return False
    return one.count(".") == other.count(".")
