"""What a bucket with a time to live last told of each key: it is silent when one expires, so silence is judged here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class HeardTable(Generic[T]):
    """The latest value of every key, with the time at which it was last heard of (monotonic seconds).

    A key that was not heard of for `ttl_s` is gone. After a reconnect there is no such verdict for twice that long, since an
    outage silences everybody.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._values: dict[str, T] = {}
        self._heard: dict[str, float] = {}
        self._no_verdict_before = 0.0

    def put(self, key: str, value: T, now: float) -> None:
        """Note what a key holds."""
        self._values[key] = value
        self._heard[key] = now

    def delete(self, key: str) -> None:
        """Forget a key that was deleted. An unknown one is fine."""
        self._values.pop(key, None)
        self._heard.pop(key, None)

    def reconnected(self, now: float) -> None:
        """Note that the bus was away until now."""
        self._no_verdict_before = now + 2 * self._ttl_s

    @property
    def known(self) -> Mapping[str, T]:
        """All that has not been found to be gone, without a new verdict."""
        return self._values

    def expire(self, now: float) -> tuple[str, ...]:
        """The keys that have fallen silent; they are forgotten."""
        if now < self._no_verdict_before:
            return ()
        silent = tuple(key for key, heard in self._heard.items() if now - heard >= self._ttl_s)
        for key in silent:
            self.delete(key)
        return silent

    def alive(self, now: float) -> Mapping[str, T]:
        """All that counts now; the rest is forgotten."""
        self.expire(now)
        return self._values
