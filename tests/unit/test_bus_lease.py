"""Leases in virtual time: one holder at a time, whatever the clocks, the line and the server do."""

import asyncio
import random
from unittest.mock import Mock

import pytest

from common.bus.errors import BusTimeout
from common.bus.faults import SeededFaults
from common.bus.lease import Lease, fence_of_holder
from common.bus.lease_term import Term, fence_of
from common.bus.memory import MemoryServer
from common.bus.port import Bucket, BucketConfig
from common.runtime.clock import Clock
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.errors import CodecError
from contracts.leases import LeaseValue

TTL_S = 10.0
CONFIG = BucketConfig(name="LEASES", ttl_s=TTL_S)


class Skewed:
    """A clock that runs at another rate and began elsewhere."""

    def __init__(self, clock: Clock, *, rate: float, start: float) -> None:
        self._clock = clock
        self._rate = rate
        self._start = start

    def monotonic(self) -> float:
        """See Clock."""
        return self._start + self._rate * self._clock.monotonic()

    def monotonic_ns(self) -> int:
        """See Clock."""
        return round(self.monotonic() * 1e9)

    def wall_time(self) -> float:
        """See Clock."""
        return self._clock.wall_time()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds / self._rate)


class Line:
    """A bucket that one candidate can be cut off from."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.is_cut = False

    def __getattr__(self, name: str) -> object:
        call = getattr(self._bucket, name)

        async def over_the_line(*args: object, **options: object) -> object:
            if self.is_cut:
                raise BusTimeout("the line is cut")
            return await call(*args, **options)

        return over_the_line


def lease(bucket: object, clock: Clock, holder: str) -> Lease:
    """A candidate."""
    value = LeaseValue(holder=holder, start=f"start-of-{holder}")
    return Lease(bucket, clock, Mock(), key="broker.0", value=value, ttl_s=TTL_S)  # type: ignore[arg-type]  # Line is one


def held(candidate: Lease) -> int | None:
    """The fence of the term that is held now."""
    return None if candidate.term is None else candidate.term.fence


def is_overdue(candidate: Lease) -> bool:
    """Whether nothing tells that the bucket still answers."""
    return candidate.is_overdue


def test_a_fence_grows_with_revisions_and_with_lives() -> None:
    """A later life of the bucket beats every revision of an earlier one; what does not fit is an error."""
    second = 1_000_000_000
    fences = [fence_of(second, 1), fence_of(second, 2**32 - 1), fence_of(2 * second, 1), fence_of(2 * second, 9)]
    assert fences == sorted(set(fences))
    assert fence_of(2**30 * second, 2**32 - 1) < 2**63
    with pytest.raises(ValueError, match="revision"):
        fence_of(second, 2**32)


def test_a_term_counts_from_the_sending_of_its_last_write() -> None:
    """Renew at a quarter, over at seven tenths; renewing keeps the fence."""
    term = Term(ttl_s=10.0, fence=7, revision=3, renewed_at=100.0)
    assert (term.renew_at, term.ends_at) == (102.5, 107.0)
    assert term.is_held(106.9)
    assert not term.is_held(107.0)
    assert not term.is_overdue(103.4)
    assert term.is_overdue(103.5)
    later = term.renewed(revision=4, sent_at=102.5)
    assert (later.fence, later.revision, later.ends_at) == (7, 4, 109.5)


def test_one_holds_and_the_other_one_follows_when_it_is_given_back() -> None:
    """The second stands by while the first renews for many ttls; a release is noticed within a poll."""

    async def main(clock: VirtualClock) -> None:
        bucket = await MemoryServer(clock).connect().ensure_bucket(CONFIG)
        first, second = lease(bucket, clock, "first"), lease(bucket, clock, "second")
        term = await first.acquire()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(first.keep(), name="keep")
            waiting = tasks.create_task(second.acquire(), name="wait")
            await clock.sleep(20 * TTL_S)
            assert not waiting.done()
            assert held(first) == term.fence
            keeping.cancel()
            await first.release()
            await first.release()
            assert held(first) is None
            released_at = clock.monotonic()
            following = await waiting
        assert clock.monotonic() - released_at <= 0.1 * TTL_S + 1e-6
        assert following.fence > term.fence

    run_virtual(main)


def test_the_lease_shows_the_fence_of_its_term_from_its_first_write_on() -> None:
    """Before the first renewal and after each; in a second term of the same start, too; nothing when nobody holds it."""

    async def main(clock: VirtualClock) -> None:
        bucket = await MemoryServer(clock).connect().ensure_bucket(CONFIG)
        holder = lease(bucket, clock, "holder")
        assert await fence_of_holder(bucket, "broker.0") is None
        fences = []
        for _ in range(2):  # the second time the value of the first term is still there
            term = await holder.acquire()
            fences.append(term.fence)
            assert await fence_of_holder(bucket, "broker.0") == term.fence
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(holder.keep(), name="keep")
                for _ in range(3):
                    await clock.sleep(0.3 * TTL_S)
                    assert await fence_of_holder(bucket, "broker.0") == term.fence == held(holder)
                keeping.cancel()
        assert fences == sorted(set(fences))
        await bucket.put("broker.0", b"no lease")
        with pytest.raises(CodecError):
            await fence_of_holder(bucket, "broker.0")

    run_virtual(main)


def test_a_holder_that_is_cut_off_steps_down_before_the_next_one_may_begin() -> None:
    """It knows by its own clock; the other one gets the lease when the server has forgotten it."""

    async def main(clock: VirtualClock) -> None:
        bucket = await MemoryServer(clock).connect().ensure_bucket(CONFIG)
        line = Line(bucket)
        first, second = lease(line, clock, "first"), lease(bucket, clock, "second")
        await first.acquire()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(first.keep(), name="keep")
            waiting = tasks.create_task(second.acquire(), name="wait")
            await clock.sleep(12.6)  # a renewal has just been made, at 12.5
            line.is_cut = True
            await clock.sleep(3.3)
            assert (is_overdue(first), held(first) is None) == (False, False)
            await clock.sleep(0.2)
            assert (is_overdue(first), held(first) is None) == (True, False)
            assert await keeping == "it could not be renewed in time"
            assert is_overdue(first)
            stepped_down_at = clock.monotonic()
            assert stepped_down_at == pytest.approx(12.5 + 0.7 * TTL_S, abs=1e-3)
            assert first.term is None
            assert not waiting.done()
            await waiting
            assert clock.monotonic() == pytest.approx(12.5 + TTL_S, abs=0.1 * TTL_S)

    run_virtual(main)


def test_a_lease_that_somebody_else_holds_or_that_is_gone_ends_the_term_at_once() -> None:
    """Whatever an operator does to the key, the holder hears of it at its next renewal."""

    async def main(clock: VirtualClock) -> None:
        bucket = await MemoryServer(clock).connect().ensure_bucket(CONFIG)
        for meddle, reason in (
            (lambda: bucket.put("broker.0", b"mine now"), "somebody else holds it"),
            (lambda: bucket.delete("broker.0"), "it has expired"),
        ):
            holder = lease(bucket, clock, "holder")
            await holder.acquire()
            await meddle()
            began = clock.monotonic()
            assert await holder.keep() == reason
            assert clock.monotonic() - began <= 0.25 * TTL_S + 1e-6
            assert holder.term is None
            assert await holder.keep() == "it was not held"

    run_virtual(main)


def test_a_write_without_an_answer_neither_begins_nor_ends_a_term() -> None:
    """An unheard `create` is found and followed by a write that is acknowledged; an unheard renewal, too."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(CONFIG)
        holder = lease(bucket, clock, "holder")
        unheard = SeededFaults(random.Random(0), answer_loss=1.0)
        good = server.faults
        began = clock.monotonic()

        async def lose_answers_for(seconds: float) -> None:
            server.faults = unheard
            await clock.sleep(seconds)
            server.faults = good

        async with asyncio.TaskGroup() as tasks:
            entry = tasks.create_task(_created_unheard(server, bucket), name="unheard")
            await entry
            term = await holder.acquire()
            assert term.revision == 2
            assert term.renewed_at > began
            tasks.create_task(lose_answers_for(3.0), name="lose")
            keeping = tasks.create_task(holder.keep(), name="keep")
            await clock.sleep(2 * TTL_S)
            assert held(holder) == term.fence
            keeping.cancel()

    run_virtual(main)


async def _created_unheard(server: MemoryServer, bucket: Bucket) -> None:
    """Let the holder's own `create` get through without an answer."""
    good = server.faults
    server.faults = SeededFaults(random.Random(0), answer_loss=1.0)
    value = b'{"holder":"holder","start":"start-of-holder"}'
    with pytest.raises(BusTimeout):
        await bucket.create("broker.0", value)
    server.faults = good


@pytest.mark.parametrize("seed", range(3, 11))
def test_there_is_never_more_than_one_holder(seed: int) -> None:
    """Skewed clocks, a bad line, a server that freezes and dies, holders that stand still: one at a time, fences grow."""

    async def main(clock: VirtualClock) -> int:
        rng = random.Random(seed)
        faults = SeededFaults(random.Random(seed + 1), store_loss=0.05, answer_loss=0.1, store_delay_s=0.3)
        server = MemoryServer(clock, faults=faults)
        candidates: list[Lease] = []
        fences: list[int] = []

        async def contend(candidate: Lease) -> None:
            while True:
                fences.append((await candidate.acquire()).fence)
                if rng.random() < 0.3:
                    await clock.sleep(rng.random() * 3 * TTL_S)  # does not renew: a process that stands still
                await candidate.keep()

        async def watch() -> None:
            while True:
                await clock.sleep(0.05)
                holders = [each for each in candidates if each.term is not None]
                assert len(holders) <= 1

        async def trouble() -> None:
            for _ in range(30):
                await clock.sleep(rng.random() * 2 * TTL_S)
                match rng.randrange(3):
                    case 0:
                        server.freeze()
                        await clock.sleep(rng.random() * 1.5 * TTL_S)
                        server.thaw()
                    case 1:
                        server.go_down()
                        await clock.sleep(rng.random() * TTL_S)
                        server.come_back()
                    case 2:
                        pass
            await clock.sleep(3 * TTL_S)

        for name in ("one", "two", "three"):
            bucket = await server.connect().ensure_bucket(CONFIG)
            skewed = Skewed(clock, rate=rng.uniform(0.8, 1.25), start=rng.uniform(0, 1000))
            candidates.append(lease(bucket, skewed, name))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(contend(each), name="contend") for each in candidates]
            running.append(tasks.create_task(watch(), name="watch"))
            await trouble()
            for task in running:
                task.cancel()
        assert fences == sorted(set(fences))
        return len(fences)

    assert run_virtual(main) > 5


def test_the_loss_of_the_store_ends_the_term_and_begins_one_with_a_larger_fence() -> None:
    """Revisions start again, the fence does not."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(CONFIG)
        for _ in range(50):
            await bucket.put("other", b"")
        holder = lease(bucket, clock, "holder")
        before = await holder.acquire()
        server.go_down()
        server.come_back(wiped=True)
        assert await holder.keep() == "it has expired"
        after = await holder.acquire()
        assert after.revision < before.revision
        assert after.fence > before.fence

    run_virtual(main)


def test_a_write_over_a_revision_of_another_life_of_the_store_prolongs_no_term() -> None:
    """The first writes of two lives have the same number: who led before the loss would lead on, under a fence that nobody obeys."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(CONFIG)
        old, new = lease(bucket, clock, "old"), lease(bucket, clock, "new")
        before = await old.acquire()
        server.go_down()
        server.come_back(wiped=True)
        between = await new.acquire()
        assert between.revision == before.revision
        async with asyncio.timeout(TTL_S):
            assert await old.keep() == "the store was lost, and the term with it"
        after = await old.acquire()
        assert after.fence > between.fence

    run_virtual(main)
