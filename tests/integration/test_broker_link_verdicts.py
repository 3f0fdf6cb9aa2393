"""The broker takes no handoff on a pair of workers that `PD_LINKS` calls refused, and says in whose words."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus.memory import MemoryServer
from common.bus.storage import LINKS_CONFIG
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import ListHandoffs
from contracts.links import LinkRecord, LinkState
from contracts.requests import Accepted, Refused, WorkerRef
from services.broker.core import link_verdicts
from services.broker.core.link_verdicts import LinkVerdicts
from tests.integration.broker_world import DECODE, HANDOFF, PREFILL, World, in_world

KEY = subjects.link_key(PREFILL.worker_id, DECODE.worker_id)


def record(state: LinkState, **changes: Any) -> LinkRecord:
    """What the prefill worker says of the pair."""
    values: dict[str, Any] = {
        "prefill": PREFILL,
        "decode": DECODE,
        "state": state,
        "since": "2030-01-01T00:00:00+00:00",
    }
    return LinkRecord(**(values | changes))


async def say(world: World, value: bytes | None) -> None:
    """Put the pair's record, or delete it, and let the broker hear of it."""
    bucket = await world.bus.ensure_bucket(LINKS_CONFIG)
    await (bucket.delete(KEY) if value is None else bucket.put(KEY, value))
    await world.clock.sleep(0.1)


@pytest.mark.parametrize(
    ("state", "code", "text"),
    [
        (LinkState.REFUSED, ErrorCode.INCOMPATIBLE_WORKERS, "prefill-0 and decode-0 are not linked: dtypes: planted"),
        (LinkState.UNLINKING, ErrorCode.DRAINING, "prefill-0 and decode-0 are being unlinked"),
    ],
)
def test_a_submit_on_such_a_pair_is_refused_by_name(state: LinkState, code: ErrorCode, text: str) -> None:
    """No worker is asked anything, and the next submit is accepted once the pair is linked."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await say(world, encode(record(state, rule="same_dtypes", reason="dtypes: planted")))
        answer = await world.submit()
        assert isinstance(answer, Refused)
        assert (answer.error.code, answer.error.message) == (code, text)
        assert {type(message) for message in (*world.prefill.heard, *world.decode.heard)} <= {ListHandoffs}
        await say(world, encode(record(LinkState.LINKED)))
        assert await world.submit() == Accepted(handoff_id=HANDOFF)

    in_world(scenario)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"garbage",
        encode(record(LinkState.MEETING)),
        encode(record(LinkState.REFUSED, decode=WorkerRef(worker_id="decode-0", incarnation="another"))),
        encode(record(LinkState.REFUSED, prefill=WorkerRef(worker_id="prefill-0", incarnation="another"))),
    ],
    ids=["deleted", "garbage", "meeting", "another-decode", "another-prefill"],
)
def test_anything_else_forbids_nothing(value: bytes | None) -> None:
    """The table may be behind: a pair without a verdict on these two starts may be tried."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        if value is None:
            await say(world, encode(record(LinkState.REFUSED)))
        await say(world, value)
        assert await world.submit() == Accepted(handoff_id=HANDOFF)

    in_world(scenario)


def test_verdicts_go_with_their_workers_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bucket is filled with, the broker remembers so many at most, the latest ones."""
    verdicts = LinkVerdicts()
    verdicts.heard(KEY, record(LinkState.REFUSED))
    verdicts.drop(WorkerRef(worker_id="decode-0", incarnation="another"))
    assert len(verdicts) == 1
    verdicts.drop(DECODE)
    assert len(verdicts) == 0
    monkeypatch.setattr(link_verdicts, "MAX_VERDICTS", 3)
    for number in range(9):
        verdicts.heard(f"p.d{number}", record(LinkState.UNLINKING))
    assert len(verdicts) == 3
    verdicts.left("p.d8")
    verdicts.left("p.d8")
    assert len(verdicts) == 2
