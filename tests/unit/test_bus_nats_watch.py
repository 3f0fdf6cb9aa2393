"""How soon a watch is read again after what could not be read."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Self

import pytest

from common.bus.errors import BusUnavailable
from common.bus.nats_bucket import NatsBucket, feed_watch
from common.bus.nats_reader import Read, ReaderBroken
from common.bus.port import Snapshot, Stored
from common.bus.queues import QueuedWatch
from common.bus.storage import WORKER_TTL_S
from common.runtime.virtual_time import VirtualClock, run_virtual


class _Pass:
    """A pass that cannot begin while there is no store, or that finds `num_pending` entries and breaks off behind them."""

    def __init__(self, *, num_pending: int, refused: bool) -> None:
        self.num_pending = num_pending
        self._left = num_pending
        self._refused = refused

    async def __aenter__(self) -> Self:
        if self._refused:
            raise BusUnavailable("no store", maybe_done=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def next(self) -> Read:
        """One entry after another."""
        if self._left == 0:
            raise ReaderBroken("the server went silent")
        self._left -= 1
        return Read(Stored("$KV.B.key", b"", {}, 1, 0.0), self._left)


async def _leave() -> None:
    pass


async def _connected() -> None:
    pass


def _begun_at(clock: VirtualClock, passes: list[_Pass]) -> tuple[asyncio.Task[None], list[float], QueuedWatch]:
    """Feed a watch by these passes, the last for ever, and note when each begins."""
    times: list[float] = []

    def open_reader(*_: object, **__: object) -> Any:
        times.append(clock.monotonic())
        return passes.pop(0) if len(passes) > 1 else passes[0]

    watch = QueuedWatch(leave=_leave)
    unused: Any = None
    bucket = NatsBucket("B", unused, open_reader, unused)
    feeder = asyncio.get_running_loop().create_task(feed_watch(bucket, ">", watch, _connected), name="feeder")
    return feeder, times, watch


def test_a_store_that_comes_back_is_read_again_before_anything_in_it_expires() -> None:
    """Also after minutes: workers put their records again at once, and a late reader would take all of them for gone."""

    async def scenario(clock: VirtualClock) -> None:
        feeder, times, watch = _begun_at(clock, [_Pass(num_pending=0, refused=True)])
        await clock.sleep(300.0)
        feeder.cancel()
        await watch.stop()
        pauses = [later - before for before, later in itertools.pairwise(times)]
        assert pauses[0] < pauses[1] < pauses[2]  # a storm at first
        assert max(pauses) <= WORKER_TTL_S / 2
        assert 300.0 - times[-1] <= WORKER_TTL_S / 2

    run_virtual(scenario)


@pytest.mark.parametrize("num_pending", [0, 1])
def test_a_pass_that_found_all_there_is_begins_the_pauses_anew(num_pending: int) -> None:
    """An empty bucket can be read as well as another one."""

    async def scenario(clock: VirtualClock) -> None:
        failing = [_Pass(num_pending=0, refused=True) for _ in range(6)]
        whole = _Pass(num_pending=num_pending, refused=False)
        feeder, times, watch = _begun_at(clock, [*failing, whole, _Pass(num_pending=0, refused=True)])
        async with asyncio.timeout(60.0):
            async for news in watch:
                if isinstance(news, Snapshot):
                    break
            at = clock.monotonic()
            while times[-1] <= at:
                await clock.sleep(0.05)
        feeder.cancel()
        assert times[1] - times[0] == pytest.approx(times[-1] - at)

    run_virtual(scenario)
