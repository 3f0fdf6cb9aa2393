"""Log lines become a few words."""

from __future__ import annotations

import json

import pytest

from services.launcher.core.log_line import cause, last_word, readable


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ((), ""),
        (('{"event": "engine_started"}',), "engine started"),
        (("x", '{"event": "engine_loading", "phase": "weights", "done": 3, "total": 8}'), "engine loading weights 3/8"),
        (("Traceback (most recent call last):",), ""),
        (("[1]",), ""),
        (('{"no": "event"}',), ""),
    ],
)
def test_the_last_line_says_how_far_it_is(lines: tuple[str, ...], word: str) -> None:
    """What is not a log line of ours is not guessed at."""
    assert last_word(lines) == word


def test_a_log_line_is_readable() -> None:
    """Fields follow the event; of an exception only its place is shown, never the values that it held."""
    frame = {"filename": "/a/app.py", "lineno": 7, "name": "main", "locals": {"prompt": "secret"}}
    line = {
        "time": "2025-01-01T00:00:00Z",
        "level": "error",
        "service": "decode",
        "event": "task_failed",
        "error": "KeyError('x')",
        "exception": [{"exc_type": "KeyError", "frames": [{"name": "outer"}, frame]}, {}],
    }
    expected = "2025-01-01T00:00:00Z error task_failed error=KeyError('x') (KeyError at /a/app.py:7 in main)"
    assert readable(json.dumps(line)) == expected


@pytest.mark.parametrize("line", ["Killed", "[1]", '{"event": 3}'])
def test_other_lines_stay_as_they_are(line: str) -> None:
    """A crash below Python says something too."""
    assert readable(line) == line


def test_a_long_line_is_cut() -> None:
    """One line must not push the others off the screen."""
    assert len(readable("x" * 5000)) == 403


def test_why_a_service_ended_is_in_its_last_words() -> None:
    """The failure that came first: what follows are its consequences. Other errors in a log ended nobody."""
    lines = [
        json.dumps({"event": "rpc_failed", "level": "error", "error": "no"}),
        "Traceback (most recent call last):",
        json.dumps({"event": "task_failed", "error": "EngineDeadError('rank 0 (pid 7) ended with status 1')"}),
        json.dumps({"event": "task_failed", "error": "consequence"}),
        json.dumps({"event": "service_stopped", "exit_status": 1}),
    ]
    assert cause(lines) == "EngineDeadError('rank 0 (pid 7) ended with status 1')"
    assert cause([json.dumps({"event": "service_ended", "reason": "its lease lapsed"})]) == "its lease lapsed"
    assert cause([*lines[:2], "[1]", lines[4]]) == ""
