"""Requests go to the least loaded complete way; otherwise the refusal says why."""

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import DisaggregatedRoute, MixedRoute, WorkerRef
from contracts.workers import Link, LinkState, WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.router.core.placement import Loads, Placing, largest_sequence, place, ref_of
from services.router.core.readiness import missing
from services.router.core.worker_table import WorkerTable


def worker(worker_id: str, *, links: tuple[str, ...] = (), running: int = 0, **fields: Any) -> WorkerRecord:
    """A record; the role is the beginning of the id."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"i{worker_id}",
        "role": WorkerRole(worker_id.split("-", maxsplit=1)[0]),
        "state": WorkerState.READY,
        "model": "tiny",
        "model_fingerprint": "f",
        "tp": 1,
        "dp": 1,
        "dcp": 1,
        "block_size": 16,
        "num_blocks": 100,
        "num_slots": 4,
        "max_sequence_tokens": 1000,
        "load": WorkerLoad(num_free_blocks=100, num_free_slots=4, num_waiting=0, num_running=running),
        "links": tuple(Link(worker_id=each, incarnation=f"i{each}", state=LinkState.LINKED) for each in links),
    }
    return WorkerRecord(**(values | fields))


def table(*records: WorkerRecord) -> dict[str, WorkerRecord]:
    """Records by id."""
    return {record.worker_id: record for record in records}


def placing(**fields: Any) -> Placing:
    """A small request."""
    values: dict[str, Any] = {"model": "tiny", "num_prompt_tokens": 10, "max_tokens": 5}
    return Placing(**(values | fields))


def pair(prefill: str, decode: str) -> DisaggregatedRoute:
    """The route over two workers."""
    return DisaggregatedRoute(
        prefill=WorkerRef(worker_id=prefill, incarnation=f"i{prefill}"),
        decode=WorkerRef(worker_id=decode, incarnation=f"i{decode}"),
    )


def test_only_linked_pairs_are_taken() -> None:
    """A link counts for the start of the decode worker that it names."""
    records = table(worker("prefill-0", links=("decode-1",)), worker("decode-0"), worker("decode-1"))
    assert place(records, Loads(), placing()) == pair("prefill-0", "decode-1")
    restarted = records | table(worker("decode-1", incarnation="new"))
    with pytest.raises(PdmeshError, match="no prefill worker is linked to a decode worker") as caught:
        place(restarted, Loads(), placing())
    assert caught.value.code is ErrorCode.NO_ROUTE


def test_refused_pairs_are_named() -> None:
    """The reason of the refusal reaches whoever asks."""
    link = Link(worker_id="decode-0", incarnation="idecode-0", state=LinkState.REFUSED, reason="block sizes differ")
    records = table(msgspec.structs.replace(worker("prefill-0"), links=(link,)), worker("decode-0"))
    with pytest.raises(PdmeshError, match="prefill-0 has refused decode-0: block sizes differ"):
        place(records, Loads(), placing())


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no worker is ready"),
        ([worker("prefill-0", links=("decode-0",))], "no decode worker is ready"),
        ([worker("decode-0")], "no prefill worker is ready"),
        ([worker("mixed-0", state=WorkerState.DRAINING)], "mixed-0 is draining"),
        ([worker("mixed-0", model="other")], "mixed-0 serves 'other', not 'tiny'"),
    ],
)
def test_what_is_missing_is_said(records: list[WorkerRecord], reason: str) -> None:
    """No way through the mesh: 503 with the reason."""
    with pytest.raises(PdmeshError, match=reason) as caught:
        place(table(*records), Loads(), placing())
    assert caught.value.code is ErrorCode.NO_ROUTE
    assert any(reason in problem for problem in missing(table(*records), model="tiny", expected=()))


def test_the_least_loaded_way_wins() -> None:
    """Load is that of both workers of a pair; a mixed worker's counts twice."""
    busy = worker("decode-0", running=3)
    records = table(worker("prefill-0", links=("decode-0", "decode-1")), busy, worker("decode-1", running=1))
    assert place(records, Loads(), placing()) == pair("prefill-0", "decode-1")
    records |= table(worker("mixed-0", running=1))
    assert place(records, Loads(), placing()) == pair("prefill-0", "decode-1")
    records |= table(worker("mixed-0"))
    assert place(records, Loads(), placing()) == MixedRoute(mixed=ref_of(worker("mixed-0")))


def test_own_counts_hold_against_stale_records() -> None:
    """Requests that were placed after a worker wrote its record count, and are gone without a trace once they end."""
    records = table(worker("mixed-0"), worker("mixed-1"))
    loads = Loads()
    loads.add(ref_of(records["mixed-0"]))
    for turn in range(2):
        assert place(records, loads, placing(turn=turn)) == MixedRoute(mixed=ref_of(records["mixed-1"]))
    loads.remove(ref_of(records["mixed-0"]))
    assert loads.counts == {}


def test_equals_take_turns() -> None:
    """Idle workers share one request after another."""
    records = table(worker("mixed-0"), worker("mixed-1"), worker("mixed-2"))
    routes = [place(records, Loads(), placing(turn=turn)) for turn in range(6)]
    assert routes[:3] == routes[3:]
    assert len({route.mixed for route in routes if isinstance(route, MixedRoute)}) == 3


def test_avoided_workers_come_last() -> None:
    """A worker that has just refused is tried again only if there is no other."""
    records = table(worker("mixed-0", running=2), worker("mixed-1"))
    assert place(records, Loads(), placing(avoid={"mixed-1"})) == MixedRoute(mixed=ref_of(records["mixed-0"]))
    assert place(records, Loads(), placing(avoid={"mixed-0", "mixed-1"})) == MixedRoute(
        mixed=ref_of(records["mixed-1"])
    )


def test_full_workers_come_after_those_with_room() -> None:
    """Without free slots or blocks the request would only be refused there."""
    full = WorkerLoad(num_free_blocks=100, num_free_slots=0, num_waiting=0, num_running=0)
    tight = WorkerLoad(num_free_blocks=1, num_free_slots=4, num_waiting=0, num_running=0)
    records = table(worker("mixed-0", load=full), worker("mixed-1", running=3), worker("mixed-2", load=tight))
    assert place(records, Loads(), placing(num_prompt_tokens=20)) == MixedRoute(mixed=ref_of(records["mixed-1"]))


def test_prompts_that_fit_nowhere_are_refused_for_good() -> None:
    """Not "try later": 413. A smaller worker is passed over for a larger one."""
    records = table(worker("mixed-0", max_sequence_tokens=20), worker("mixed-1", running=3, max_sequence_tokens=50))
    assert largest_sequence(records, model="tiny") == 50
    assert place(records, Loads(), placing(num_prompt_tokens=30)) == MixedRoute(mixed=ref_of(records["mixed-1"]))
    with pytest.raises(PdmeshError, match="the largest holds 50") as caught:
        place(records, Loads(), placing(num_prompt_tokens=46))
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG


def test_prefill_holds_the_prompt_only() -> None:
    """Room for the answer is needed on the decode side alone."""
    records = table(worker("prefill-0", links=("decode-0",), max_sequence_tokens=40), worker("decode-0"))
    assert place(records, Loads(), placing(num_prompt_tokens=40, max_tokens=900)) == pair("prefill-0", "decode-0")
    with pytest.raises(PdmeshError, match="prompts of 40"):
        place(records, Loads(), placing(num_prompt_tokens=41))


def test_expected_workers_must_be_there_ready_and_linked() -> None:
    """Each gap is named; nothing missing means ready."""
    expected = ("prefill-0", "decode-0", "decode-1")
    records = table(worker("prefill-0", links=("decode-0",)), worker("decode-0"))
    assert missing(records, model="tiny", expected=expected) == ["decode-1 has not registered"]
    records |= table(worker("decode-1"))
    assert missing(records, model="tiny", expected=expected) == ["prefill-0 is not linked to decode-1 yet"]
    records |= table(worker("prefill-0", links=("decode-0", "decode-1")))
    assert missing(records, model="tiny", expected=expected) == []


def test_silent_workers_disappear() -> None:
    """The bucket does not tell of an expiry; an outage silences everybody, so after it there is twice the time."""
    workers = WorkerTable(ttl_s=6.0)
    workers.put(worker("mixed-0"), 100.0)
    assert set(workers.alive(105.0)) == {"mixed-0"}
    workers.reconnected(105.5)
    assert set(workers.alive(117.0)) == {"mixed-0"}
    assert set(workers.alive(117.5)) == set()
    workers.put(worker("mixed-0"), 118.0)
    workers.delete("mixed-0")
    workers.delete("mixed-0")
    assert set(workers.alive(118.0)) == set()
