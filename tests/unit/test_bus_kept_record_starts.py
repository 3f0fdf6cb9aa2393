"""Two starts of one id: the later one keeps the record, the earlier one gives way; and nobody gives way to himself or to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import pytest
import structlog

from common.bus.errors import BusTimeout, BusUnavailable
from common.bus.kept_record import PUT_EVERY_S, KeptRecord
from common.bus.memory import MemoryServer
from common.bus.port import Bucket, BucketConfig, Bus, Entry
from common.bus.storage import ROUTER_TTL_S, ROUTERS_CONFIG
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, ServiceEnded
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.codec import decode, encode
from contracts.routers import RouterRecord

T = TypeVar("T")

KEY = "router-0"
LONG_S = 5 * ROUTER_TTL_S


class Line:
    """A connection of one start, and its bucket: it can be cut, and lose the answers to writes, without anybody's notice."""

    replicas = 1

    def __init__(self, server: MemoryServer) -> None:
        self._bus = server.connect()
        self._bucket: Bucket | None = None
        self.is_cut = False
        self.reconnects = 0
        self._connected = asyncio.Event()
        self._connected.set()
        self.loses_answer: Callable[[], bool] = lambda: False
        self.told: list[Entry | None] = []
        """What the next reads are told, by a server that is behind."""
        self.num_told = 0

    @property
    def is_connected(self) -> bool:
        """See `port.Bus.is_connected`: whoever is merely cut does not know."""
        return self._connected.is_set()

    def lose(self) -> None:
        """Lose the connection, and know it."""
        self._connected.clear()

    def come_back(self) -> None:
        """Be connected again."""
        self.reconnects += 1
        self._connected.set()

    async def reconnected(self, after: int) -> int:
        """See `port.Bus.reconnected`."""
        while self.reconnects <= after:
            await self._connected.wait()
        return self.reconnects

    async def ensure_bucket(self, config: BucketConfig) -> Bucket:
        """Itself, as the bucket."""
        self._bucket = await self._bus.ensure_bucket(config)
        return cast("Bucket", self)

    async def epoch(self) -> int:
        """See `port.Bucket.epoch`."""
        return await self._over(lambda bucket: bucket.epoch())

    async def get(self, key: str) -> Entry | None:
        """See `port.Bucket.get`."""
        if self.told:
            self.num_told += 1
            return self.told.pop(0)
        return await self._over(lambda bucket: bucket.get(key))

    async def put(self, key: str, value: bytes) -> int:
        """See `port.Bucket.put`."""
        return await self._over(lambda bucket: bucket.put(key, value), writes=True)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """See `port.Bucket.update`."""
        return await self._over(lambda bucket: bucket.update(key, value, last=last), writes=True)

    async def create(self, key: str, value: bytes) -> int:
        """See `port.Bucket.create`."""
        return await self._over(lambda bucket: bucket.create(key, value), writes=True)

    async def delete(self, key: str, last: int | None = None) -> None:
        """See `port.Bucket.delete`."""
        await self._over(lambda bucket: bucket.delete(key, last=last), writes=True)

    async def _over(self, act: Callable[[Bucket], Coroutine[Any, Any, T]], *, writes: bool = False) -> T:
        assert self._bucket is not None
        if not self.is_connected:
            raise BusUnavailable("not connected", maybe_done=False)
        if self.is_cut:
            await asyncio.sleep(5.0)
            raise BusTimeout("no answer")
        answer = await act(self._bucket)
        if writes and self.loses_answer():
            await asyncio.sleep(5.0)
            raise BusTimeout("no answer")
        return answer


class Mesh:
    """A server, and starts of one id."""

    def __init__(self, clock: VirtualClock, group: asyncio.TaskGroup, bucket: Bucket, server: MemoryServer) -> None:
        self.clock = clock
        self.bucket = bucket
        self.server = server
        self.lines: dict[str, Line] = {}
        self.records: dict[str, KeptRecord] = {}
        self.ends: dict[str, ServiceEnded] = {}
        self.history: list[str] = []
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> Line:
        """Another start, which keeps its record from now on."""
        line = self.lines[name] = Line(self.server)
        value = encode(RouterRecord(router_id=KEY, incarnation=name))
        record = KeptRecord(cast("Bus", line), structlog.get_logger(), ROUTERS_CONFIG, lambda: (KEY, value))
        self.records[name] = record
        await record.open()
        self.spawn(self._live(name, record))
        return line

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until the scenario ends."""
        self._tasks.append(self._group.create_task(work))

    async def _live(self, name: str, record: KeptRecord) -> None:
        try:
            await record.run()
        except ServiceEnded as end:
            self.ends[name] = end

    def kill(self, name: str) -> None:
        """Nothing more is heard of a start."""
        self.lines[name].is_cut = True

    async def note_writes(self) -> None:
        """Note each start whose record is written."""
        async with await self.bucket.watch() as watch:
            async for entry in watch:
                if isinstance(entry, Entry) and not entry.deleted:
                    self.history.append(decode(entry.value, RouterRecord).incarnation)

    async def holder(self) -> str | None:
        """Whose record is there."""
        entry = await self.bucket.get(KEY)
        return None if entry is None else decode(entry.value, RouterRecord).incarnation

    async def never_without(self, seconds: float) -> None:
        """Let time go by, in all of which there is a record."""
        for _ in range(round(seconds / 0.1)):
            await self.clock.sleep(0.1)
            assert await self.holder() is not None

    def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()


def in_mesh(scenario: Callable[[Mesh], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in virtual time."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(ROUTERS_CONFIG)
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(clock, group, bucket, server)
            await scenario(mesh)
            mesh.close()

    run_virtual(main)


def test_a_start_that_was_cut_off_and_replaced_gives_way_when_it_comes_back() -> None:
    """It ends with both names and a status of its own within one period; the other's record is never written over."""

    async def scenario(mesh: Mesh) -> None:
        line = await mesh.start("i1")
        await mesh.clock.sleep(2 * PUT_EVERY_S)
        line.is_cut = True
        await mesh.clock.sleep(ROUTER_TTL_S + PUT_EVERY_S)
        await mesh.start("i2")
        mesh.spawn(mesh.note_writes())
        await mesh.clock.sleep(3 * PUT_EVERY_S)
        line.is_cut = False
        await mesh.clock.sleep(3 * PUT_EVERY_S)
        assert mesh.ends["i1"].status == EXIT_LEASE_LAPSED
        assert "the start i1 gives way to the start i2" in str(mesh.ends["i1"])
        await mesh.clock.sleep(LONG_S)
        assert list(mesh.ends) == ["i1"]
        assert set(mesh.history) == {"i2"}
        await mesh.records["i1"].close()
        assert await mesh.holder() == "i2"

    in_mesh(scenario)


def test_who_is_connected_again_looks_for_its_record_at_once() -> None:
    """Until it has looked, both starts answer whatever is said to their id."""

    async def scenario(mesh: Mesh) -> None:
        line = await mesh.start("i1")
        await mesh.clock.sleep(2.5 * PUT_EVERY_S)
        line.lose()
        await mesh.clock.sleep(ROUTER_TTL_S)
        await mesh.start("i2")
        await mesh.clock.sleep(PUT_EVERY_S)
        line.come_back()
        await mesh.clock.sleep(0.01)
        assert list(mesh.ends) == ["i1"]
        assert await mesh.holder() == "i2"

    in_mesh(scenario)


def test_two_that_start_at_once_leave_one() -> None:
    """Each takes the key when it begins: the last one keeps it."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        await mesh.start("i2")
        await mesh.clock.sleep(LONG_S)
        assert list(mesh.ends) == ["i1"]
        assert await mesh.holder() == "i2"

    in_mesh(scenario)


def test_a_new_start_takes_the_place_of_a_dead_one_at_once() -> None:
    """Though the dead one's record is there for some seconds yet."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        await mesh.clock.sleep(3 * PUT_EVERY_S)
        mesh.kill("i1")
        began = mesh.clock.monotonic()
        await mesh.start("i2")
        assert mesh.clock.monotonic() == began
        assert await mesh.holder() == "i2"
        await mesh.never_without(LONG_S)
        assert not mesh.ends

    in_mesh(scenario)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_lost_answers_to_writes_end_nobody(every: int) -> None:
    """The writes were made: what is found is one's own, and the record lives on. Also when no answer comes at all for a while."""

    async def scenario(mesh: Mesh) -> None:
        line = await mesh.start("i1")
        writes = 0

        def loses() -> bool:
            nonlocal writes
            writes += 1
            return writes % every == 0 and writes < 40

        line.loses_answer = loses
        await mesh.never_without(LONG_S)
        assert writes > 5
        assert not mesh.ends

    in_mesh(scenario)


def test_a_record_that_is_gone_is_made_anew() -> None:
    """It expired while the bus was away, or a stranger removed it."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        await mesh.clock.sleep(PUT_EVERY_S)
        mesh.server.go_down()
        await mesh.clock.sleep(2 * ROUTER_TTL_S)
        mesh.server.come_back()
        assert await mesh.holder() is None
        await mesh.clock.sleep(1.5 * PUT_EVERY_S)
        assert await mesh.holder() == "i1"
        await mesh.bucket.delete(KEY)
        await mesh.clock.sleep(1.5 * PUT_EVERY_S)
        await mesh.never_without(LONG_S)
        assert not mesh.ends

    in_mesh(scenario)


def test_a_stranger_s_garbage_is_written_over() -> None:
    """It is no other start's record: nobody ends for it."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        await mesh.bucket.put(KEY, b"\xff no record")
        await mesh.clock.sleep(1.5 * PUT_EVERY_S)
        await mesh.never_without(LONG_S)
        assert not mesh.ends

    in_mesh(scenario)


@pytest.mark.parametrize("num_starts", [1, 2])
def test_a_bucket_that_lost_its_store_is_filled_anew(num_starts: int) -> None:
    """Revisions begin again: the record comes back under a lower one, and of two starts one stays."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        await mesh.clock.sleep(LONG_S)
        if num_starts == 2:
            mesh.lines["i1"].is_cut = True
            await mesh.start("i2")
        mesh.server.go_down()
        mesh.server.come_back(wiped=True)
        await mesh.lines[f"i{num_starts}"].ensure_bucket(ROUTERS_CONFIG)
        await mesh.clock.sleep(2 * PUT_EVERY_S)
        assert await mesh.holder() == f"i{num_starts}"
        mesh.lines["i1"].is_cut = False
        await mesh.never_without(3 * PUT_EVERY_S)
        assert list(mesh.ends) == ["i1"][: num_starts - 1]
        await mesh.never_without(LONG_S)
        assert len(mesh.ends) == num_starts - 1

    in_mesh(scenario)


def test_what_a_server_tells_that_is_behind_ends_nobody() -> None:
    """After a conflict it shows the record of the dead start before, an older one of our own, or none: all are asked for again."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.start("i1")
        before = await mesh.bucket.get(KEY)
        mesh.kill("i1")
        line = await mesh.start("i2")
        older = await mesh.bucket.get(KEY)
        await mesh.clock.sleep(3 * PUT_EVERY_S)
        for told in (before, older, None):
            line.told = [told]
            line.loses_answer = iter((True, *(False for _ in range(50)))).__next__
            await mesh.clock.sleep(4 * PUT_EVERY_S)
            assert not line.told
        assert line.num_told == 3
        assert not mesh.ends
        assert await mesh.holder() == "i2"

    in_mesh(scenario)


def test_the_farewell_removes_a_record_whose_answer_was_lost_and_none_of_another_start() -> None:
    """What is there is known by the start that it names, not by the last bytes that were sent."""

    async def scenario(mesh: Mesh) -> None:
        line = await mesh.start("i1")
        line.is_cut = True
        await mesh.clock.sleep(PUT_EVERY_S)
        line.is_cut = False
        await mesh.records["i1"].close()
        assert await mesh.holder() is None
        await mesh.start("i2")
        await mesh.records["i1"].close()
        assert await mesh.holder() == "i2"
        line = Line(mesh.server)
        line.loses_answer = lambda: True
        value = encode(RouterRecord(router_id=KEY, incarnation="i3"))
        third = KeptRecord(cast("Bus", line), structlog.get_logger(), ROUTERS_CONFIG, lambda: (KEY, value))
        with pytest.raises(BusTimeout):
            await third.open()
        assert await mesh.holder() == "i3"
        await third.close()
        assert await mesh.holder() is None

    in_mesh(scenario)
