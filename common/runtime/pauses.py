"""How long to wait before each repeat of what has failed: longer and longer, so that whoever is away is not stormed when it returns."""

from collections.abc import Iterator


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Seconds for ever: `first_s`, twice as much each time, at most `longest_s`."""
    pause_s = first_s
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(2 * pause_s, longest_s)
