"""What a service's log line says, in a few words for people who wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

_MAX_CHARACTERS: Final = 400
_LAST_WORDS: Final = {"task_failed": "error", "service_ended": "reason"}
"""The events with which a service says why it ends, and the field that does."""
_NOT_SHOWN: Final = frozenset({"service", "worker_id", "incarnation", "event", "level", "time", "exception"})


def last_word(lines: Sequence[str]) -> str:
    """The last line's event, with how far it has come if it says so; empty for a line that is not one of ours."""
    try:
        line = json.loads(lines[-1])
        words = [str(line["event"]).replace("_", " ")]
    except (ValueError, LookupError, TypeError):
        return ""
    if line.get("phase"):
        words.append(str(line["phase"]))
    if line.get("total"):
        words.append(f"{line.get('done', 0)}/{line['total']}")
    return " ".join(words)


def cause(lines: Sequence[str]) -> str:
    """Why a service ended, as the first of its last words says; empty if it had none, or what ended it left it none."""
    for line in lines:
        try:
            fields = json.loads(line)
            return _shortened(str(fields[_LAST_WORDS[fields["event"]]]))
        except (ValueError, LookupError, TypeError):
            continue
    return ""


def readable(line: str) -> str:
    """A log line for a person: when, how grave, what, its fields, and where an exception came from. Others stay as they are."""
    try:
        fields = json.loads(line)
        words = [str(fields["time"]), str(fields["level"]), str(fields["event"])]
    except (ValueError, LookupError, TypeError):
        return _shortened(line)
    words += [f"{name}={value}" for name, value in fields.items() if name not in _NOT_SHOWN]
    words += [_origin(raised) for raised in fields.get("exception") or ()]
    return _shortened(" ".join(word for word in words if word))


def _origin(raised: Any) -> str:
    """The innermost place of an exception as the logger writes it."""
    try:
        frame = raised["frames"][-1]
        return f"({raised['exc_type']} at {frame['filename']}:{frame['lineno']} in {frame['name']})"
    except (LookupError, TypeError):
        return ""


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
