"""Log lines become a few words."""

from __future__ import annotations

import pytest

from services.launcher.core.log_line import last_word


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
