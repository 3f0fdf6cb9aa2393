"""What is asked for again while it is still being done is done once: everybody waits for the same outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Calls under way, one at a time for each key. None is remembered once it has ended."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[T]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all calls under way."""
        return frozenset(self._under_way)

    async def join(self, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call, or wait for the one of this key that is under way. Everybody gets its result, or its error.

        It is made in the task of whoever asked first. Others may be cancelled without any harm to it; when it is cancelled itself, so
        are they.
        """
        under_way = self._under_way.get(key)
        if under_way is not None:
            return await asyncio.shield(under_way)
        outcome = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            result = await call()
        except Exception as error:
            outcome.set_exception(error)
            outcome.exception()  # whether anybody else has asked or not, it has been seen
            raise
        else:
            outcome.set_result(result)
            return result
        finally:
            del self._under_way[key]
            outcome.cancel()
