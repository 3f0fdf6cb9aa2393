"""A new leader looks at what an hour of traffic has left in the bucket: that must not keep it from answering."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from common.bus.faults import DIRECT, NoFaults, Trip
from common.bus.memory import MemoryServer
from common.bus.port import Bus
from common.bus.storage import handoffs_config
from common.runtime.clock import SystemClock
from contracts.codec import encode
from contracts.errors import CodecError
from contracts.handoff import HandoffRecord, HandoffState
from contracts.requests import MixedRoute, SamplingParams, WorkerRef
from services.broker.records import Records

NUM_ENDED = 5000
MOST_TOLD = 1024
RECORD = HandoffRecord(
    handoff_id="r0-0",
    request_id="r0",
    attempt=0,
    router_id="router-0",
    route=MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="im")),
    state=HandoffState.RESERVING,
    fence=1,
    num_prompt_tokens=3,
    prompt_hash="h",
    sampling=SamplingParams(max_tokens=3, seed=1),
    deadline_at="2999-01-01T00:00:00.000+00:00",
)


class CountedTrips(NoFaults):
    """How often each subject of the store was asked for."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def trip(self, subject: str) -> Trip:
        """See `Faults.trip`."""
        self.calls[subject] += 1
        return DIRECT


def record_of(number: int, state: HandoffState) -> HandoffRecord:
    """The record of a handoff of its own."""
    return replace(RECORD, handoff_id=f"r{number}-0", request_id=f"r{number}", state=state)


async def filled(bus: Bus) -> None:
    """Many that were cancelled, and among them the first and the last one go on."""
    bucket = await bus.ensure_bucket(handoffs_config(3600.0))
    await bucket.put("r0-0", encode(record_of(0, HandoffState.RESERVING)))
    for number in range(1, NUM_ENDED + 1):
        await bucket.put(f"r{number}-0", encode(record_of(number, HandoffState.CANCELLED)))
    last = NUM_ENDED + 1
    await bucket.put(f"r{last}-0", encode(record_of(last, HandoffState.COMMITTED)))


def refuse(key: str, error: CodecError) -> None:
    """None is expected."""
    raise AssertionError(key) from error


async def test_what_is_left_over_is_found_in_one_call_however_many_have_ended() -> None:
    """All that go on are found, and of those that ended the latest; the number of round trips does not grow with them."""
    trips = CountedTrips()
    clock = SystemClock()
    bus = MemoryServer(clock, faults=trips).connect()
    await filled(bus)
    records = Records(bus, clock, ttl_s=3600.0, timeout_s=5.0)
    await records.open()
    trips.calls.clear()
    found = await records.left_over(refuse)
    assert trips.calls.total() == 1
    numbers = [int(record.request_id.removeprefix("r")) for record, _ in found]
    assert numbers == [0, NUM_ENDED + 1, *range(NUM_ENDED - MOST_TOLD + 1, NUM_ENDED + 1)]
    assert [revision for _, revision in found[:2]] == [1, NUM_ENDED + 2]
