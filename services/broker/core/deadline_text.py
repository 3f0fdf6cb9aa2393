"""Moments as they stand in a record: wall time in RFC 3339, so that another broker and people can read them. Pure."""

from __future__ import annotations

import datetime as dt


def write_deadline(wall_time: float) -> str:
    """`wall_time`, in seconds since 1970 UTC, to the millisecond."""
    return dt.datetime.fromtimestamp(wall_time, dt.UTC).isoformat(timespec="milliseconds")


def moment_before(deadline_at: str, seconds: float) -> str:
    """The wall time that lies so many seconds before the deadline."""
    return write_deadline(dt.datetime.fromisoformat(deadline_at).timestamp() - seconds)


def seconds_between(earlier: str, later: str) -> float:
    """Seconds from one moment to another. Raises `ValueError` for what is no time."""
    return seconds_until(later, dt.datetime.fromisoformat(earlier).timestamp())


def seconds_left(deadline_at: str, wall_time: float) -> float:
    """Seconds from `wall_time` to the deadline; 0 once it has passed. Raises `ValueError` for what is no time."""
    return max(0.0, seconds_until(deadline_at, wall_time))


def seconds_until(moment: str, wall_time: float) -> float:
    """Seconds from `wall_time` to a moment, negative once it has passed. Raises `ValueError` for what is no time."""
    return dt.datetime.fromisoformat(moment).timestamp() - wall_time
