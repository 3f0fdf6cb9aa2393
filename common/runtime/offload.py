"""Computations that would hold up the event loop: what runs them, in a process and where there are no threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a computation off the event loop and returns its result; in a process `asyncio.to_thread`."""


async def inline(compute: Callable[[], Any]) -> Any:
    """Compute on the loop: virtual time has no threads."""
    return compute()
