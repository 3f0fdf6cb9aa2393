"""Which ranks stand still, and what waits for them to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_Token = tuple[str, int | None]


class Standstills:
    """Workers all of whose ranks stand still, and single ranks that do, of each replica alike. Each standstill ends by itself."""

    def __init__(self) -> None:
        self._still: dict[object, _Token] = {}
        self._parked: dict[str, list[Callable[[], object]]] = {}

    def begin(self, worker_id: str, rank: int | None = None) -> Callable[[], None]:
        """From now on all ranks of a worker, or one of them, stand still; returns what ends it. Twice is fine."""
        token = object()
        self._still[token] = worker_id, rank

        def end() -> None:
            if self._still.pop(token, None) is not None:
                self._go_on(worker_id)

        return end

    def forget(self, worker_id: str) -> None:
        """The ranks of a worker are gone, and nothing of them stands still."""
        self._still = {token: still for token, still in self._still.items() if still[0] != worker_id}
        self._go_on(worker_id)

    @property
    def any_holds(self) -> bool:
        """Whether anybody stands still: hardly ever."""
        return bool(self._still)

    def holds(self, worker_id: str, rank: int | None = None) -> bool:
        """Whether a rank stands still; without one, whether any of the worker's does."""
        return any(
            who == worker_id and (rank is None or which is None or which == rank) for who, which in self._still.values()
        )

    def park(self, worker_id: str, action: Callable[[], object]) -> None:
        """Do something when a standstill of a worker has ended: there may be another one, so it must look again."""
        self._parked.setdefault(worker_id, []).append(action)

    async def over(self, worker_id: str, rank: int | None = None) -> None:
        """Wait until a rank goes on; without one, until all of them do."""
        while self.holds(worker_id, rank):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.park(worker_id, lambda future=future: None if future.done() else future.set_result(None))  # type: ignore[misc]
            await future

    def _go_on(self, worker_id: str) -> None:
        for action in self._parked.pop(worker_id, []):
            action()
