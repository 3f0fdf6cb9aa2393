"""Whether somebody who has fallen silent is really gone: the bucket is asked before anybody is judged by silence.

Among several servers a bucket can be without a leader for longer than a sign of life lasts, while every connection stands.
"""

from __future__ import annotations

from typing import Final, TypeVar

from common.bus.errors import BusError
from common.bus.heard import HeardTable
from common.bus.port import Bucket
from common.runtime.clock import Clock, Deadline

_LOOK_S: Final = 2.0
"""For all keys together. A bucket without a leader does not answer at all."""

T = TypeVar("T")


async def take_gone(heard: HeardTable[T], bucket: Bucket, clock: Clock) -> tuple[str, ...]:
    """The keys that have fallen silent, and of which the bucket has nothing any more; they are forgotten.

    A bucket that does not answer tells nothing of anybody: as after an outage, there is no verdict for a while.
    """
    known = dict(heard.known)
    silent = heard.expire(clock.monotonic())
    if not silent:
        return ()
    gone: frozenset[str] | None = None
    try:
        async with Deadline.after(clock, _LOOK_S).timeout():
            gone = frozenset([key for key in silent if await bucket.get(key) is None])
    except (BusError, TimeoutError):
        heard.reconnected(clock.monotonic())
    silent = tuple(key for key in silent if key not in heard.known)  # who is known was heard meanwhile
    for key in silent:
        if gone is None or key not in gone:
            heard.put(key, known[key], clock.monotonic())
    return () if gone is None else tuple(key for key in silent if key in gone)
