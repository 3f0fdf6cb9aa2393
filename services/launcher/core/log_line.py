"""What a service's log line says, in a few words for people who wait."""

from __future__ import annotations

import json
from collections.abc import Sequence


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
