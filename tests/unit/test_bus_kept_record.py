"""A record that is kept alive: one answer that never comes does not cost it its life."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import structlog

from common.bus.kept_record import PUT_EVERY_S, KeptRecord
from common.bus.port import Bucket, Bus
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.codec import encode
from contracts.routers import RouterRecord

VALUE = encode(RouterRecord(router_id="decode-0", incarnation="i1"))


class SilentBucket:
    """A bucket of which one write is lost without an answer."""

    def __init__(self, clock: VirtualClock, silent: int) -> None:
        self._clock = clock
        self._silent = silent
        self.answered_at: list[float] = []
        self.num_puts = 0

    async def epoch(self) -> int:
        """It is the first."""
        return 1

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Answer at once, but for the one."""
        assert last == len(self.answered_at)
        return await self.put(key, value)

    async def put(self, key: str, value: bytes) -> int:
        """Answer at once, but for the one."""
        del key, value
        self.num_puts += 1
        if self.num_puts == self._silent:
            await asyncio.Event().wait()
        self.answered_at.append(self._clock.monotonic())
        return len(self.answered_at)


def test_a_put_without_an_answer_is_made_again_before_the_record_expires() -> None:
    """The third put is silent: the fourth comes when the time for one is over, at once, and well within the ttl."""

    async def main(clock: VirtualClock) -> None:
        bucket = SilentBucket(clock, silent=3)

        class OneBucket:
            """A bus with that bucket."""

            replicas = 1
            is_connected = True

            async def ensure_bucket(self, config: Any) -> Bucket:
                """The bucket."""
                del config
                return cast("Bucket", bucket)

        record = KeptRecord(
            cast("Bus", OneBucket()), structlog.get_logger(), WORKERS_CONFIG, lambda: ("decode-0", VALUE)
        )
        await record.open()
        running = asyncio.get_running_loop().create_task(record.run())
        await clock.sleep(10 * PUT_EVERY_S)
        running.cancel()
        pauses = [later - earlier for earlier, later in zip(bucket.answered_at, bucket.answered_at[1:], strict=False)]
        assert max(pauses) <= 2 * PUT_EVERY_S + 0.1 < WORKER_TTL_S
        assert len(pauses) > 5

    run_virtual(main)
