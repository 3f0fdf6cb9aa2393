"""What stands in the bucket of handoffs and is no record must not keep a broker from starting."""

import pytest
from msgspec.structs import replace

from common.bus.memory import MemoryServer
from common.bus.storage import handoffs_config
from common.runtime.clock import SystemClock
from contracts.codec import encode
from contracts.errors import CodecError
from contracts.handoff import HandoffRecord, HandoffState
from contracts.requests import MixedRoute, SamplingParams, WorkerRef
from services.broker.records import Records

RECORD = HandoffRecord(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    route=MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="im")),
    state=HandoffState.RESERVING,
    fence=1,
    num_prompt_tokens=3,
    prompt_hash="h",
    sampling=SamplingParams(max_tokens=3, seed=1),
    deadline_at="2030-01-01T00:00:00.000+00:00",
)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b'{"v":99}',
        b"[" * 50_000,
        b"\xff\xfe",
        encode(RECORD),  # of another key
        *(encode(replace(RECORD, handoff_id="r0-0", deadline_at=each)) for each in ("", "soon", "2030-01-01T00:00:00")),
        encode(replace(RECORD, handoff_id="r0-0", submitted_at="soon")),
    ],
)
async def test_unreadable_records_are_told_and_passed_over(garbage: bytes) -> None:
    """A broker finds what is readable, says what is not, and leaves it for people to look at."""
    clock = SystemClock()
    bus = MemoryServer(clock).connect()
    bucket = await bus.ensure_bucket(handoffs_config(60.0))
    await bucket.put("r0-0", garbage)
    await bucket.put(RECORD.handoff_id, encode(RECORD))
    records = Records(bus, clock, ttl_s=60.0, timeout_s=1.0)
    await records.open()
    told: list[tuple[str, CodecError]] = []
    found = await records.left_over(lambda key, error: told.append((key, error)))
    assert [record for record, _ in found] == [RECORD]
    assert [key for key, _ in told] == ["r0-0"]
    assert await bucket.get("r0-0") is not None
