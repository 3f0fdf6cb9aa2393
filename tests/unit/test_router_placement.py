"""Requests go to the least loaded complete way; otherwise the refusal says why."""

from collections import Counter
from typing import Any

import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.links import LinkRecord, LinkState
from contracts.requests import DisaggregatedRoute, MixedRoute, WorkerRef
from contracts.subjects import link_key
from contracts.workers import ReplicaRoom, WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.router.core.mesh_view import MeshView
from services.router.core.placement import Loads, Placing, largest_sequence, place, ref_of
from services.router.core.readiness import missing
from services.router.core.retry import blame


def worker(worker_id: str, *, running: int = 0, **fields: Any) -> WorkerRecord:
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
    }
    return WorkerRecord(**(values | fields))


def link(prefill: str, decode: str, state: LinkState = LinkState.LINKED, **fields: Any) -> LinkRecord:
    """A link between the usual starts of two workers."""
    values: dict[str, Any] = {
        "prefill": WorkerRef(worker_id=prefill, incarnation=f"i{prefill}"),
        "decode": WorkerRef(worker_id=decode, incarnation=f"i{decode}"),
        "state": state,
        "since": "2030-01-01T00:00:00+00:00",
    }
    return LinkRecord(**(values | fields))


def mesh(*records: WorkerRecord | LinkRecord) -> MeshView:
    """A view of workers and links."""
    workers = {record.worker_id: record for record in records if isinstance(record, WorkerRecord)}
    links = [record for record in records if isinstance(record, LinkRecord)]
    return MeshView(workers, {link_key(each.prefill.worker_id, each.decode.worker_id): each for each in links})


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


def test_a_prompt_that_must_be_whole_goes_where_a_step_holds_it() -> None:
    """A worker without chunks says how long a prompt may be; nobody else's length is bounded by it, and a refusal says why."""
    whole = worker("mixed-0", max_prompt_tokens=100)
    longer = worker("mixed-1", running=3)
    assert place(mesh(whole, longer), Loads(), placing(num_prompt_tokens=100)) == MixedRoute(mixed=ref_of(whole))
    assert place(mesh(whole, longer), Loads(), placing(num_prompt_tokens=101)) == MixedRoute(mixed=ref_of(longer))
    with pytest.raises(PdmeshError) as caught:
        place(mesh(whole), Loads(), placing(num_prompt_tokens=101))
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG
    assert caught.value.message == (
        "prompt: 101 tokens and 5 to generate fit on no worker; the largest holds 1000, and prompts of 100; "
        "computed in one step, because chunked_prefill is off: mixed-0"
    )
    pair_of = (worker("prefill-0", max_prompt_tokens=100), worker("decode-0"), link("prefill-0", "decode-0"))
    with pytest.raises(PdmeshError, match="chunked_prefill is off: prefill-0"):
        place(mesh(*pair_of), Loads(), placing(num_prompt_tokens=101))
    assert place(mesh(*pair_of), Loads(), placing(num_prompt_tokens=100)) == pair("prefill-0", "decode-0")


def test_memory_counts_for_all_ranks_that_share_a_sequence() -> None:
    """A free block of a worker with dcp 2 has room for twice the tokens."""
    load = WorkerLoad(num_free_blocks=1, num_free_slots=1, num_waiting=0, num_running=3)
    shared, alone = worker("mixed-0", dcp=2, load=load), worker("mixed-1", load=load)
    for turn in range(2):
        request = placing(num_prompt_tokens=20, max_tokens=12, turn=turn)
        assert place(mesh(shared, alone), Loads(), request) == MixedRoute(mixed=ref_of(shared))


def test_only_linked_pairs_are_taken() -> None:
    """A link counts for the starts of both workers that it names."""
    workers = (worker("prefill-0"), worker("decode-0"), worker("decode-1"))
    links = (link("prefill-0", "decode-1"), link("decode-0", "prefill-0"), link("prefill-0", "decode-9"))
    assert place(mesh(*workers, *links), Loads(), placing()) == pair("prefill-0", "decode-1")
    for changed in (worker("decode-1", incarnation="new"), worker("prefill-0", incarnation="new")):
        with pytest.raises(PdmeshError, match="no prefill worker is linked to a decode worker") as caught:
            place(mesh(*workers, changed, *links), Loads(), placing())
        assert caught.value.code is ErrorCode.NO_ROUTE


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            link("prefill-0", "decode-0", LinkState.REFUSED, reason="dtypes differ"),
            "has refused decode-0: dtypes differ",
        ),
        (link("prefill-0", "decode-0", LinkState.UNLINKING), "is being unlinked from decode-0"),
        (link("prefill-0", "decode-0", LinkState.MEETING), "is not linked to decode-0 yet"),
        (
            link("prefill-0", "decode-0", LinkState.MEETING, num_failures=2, reason="no answer"),
            "is not linked to decode-0 yet: 2 tries failed: no answer",
        ),
        (link("prefill-0", "decode-1"), "is not linked to decode-0 yet"),
    ],
    ids=["refused", "unlinking", "meeting", "meeting-again", "none"],
)
def test_a_pair_in_any_other_state_is_never_placed_and_says_why(record: LinkRecord, problem: str) -> None:
    """The reason reaches whoever asks: the client of a request, and `/ready`."""
    view = mesh(worker("prefill-0"), worker("decode-0"), record)
    with pytest.raises(PdmeshError, match=f"prefill-0 {problem}"):
        place(view, Loads(), placing())
    assert any(f"prefill-0 {problem}" in each for each in missing(view, model="tiny", expected=()))
    assert missing(view, model="tiny", expected=("prefill-0", "decode-0")) == [f"prefill-0 {problem}"]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no worker is ready"),
        ([worker("prefill-0"), link("prefill-0", "decode-0")], "no decode worker is ready"),
        ([worker("decode-0")], "no prefill worker is ready"),
        ([worker("mixed-0", state=WorkerState.DRAINING)], "mixed-0 is draining"),
        ([worker("mixed-0", model="other")], "mixed-0 serves 'other', not 'tiny'"),
    ],
)
def test_what_is_missing_is_said(records: list[WorkerRecord | LinkRecord], reason: str) -> None:
    """No way through the mesh: 503 with the reason."""
    with pytest.raises(PdmeshError, match=reason) as caught:
        place(mesh(*records), Loads(), placing())
    assert caught.value.code is ErrorCode.NO_ROUTE
    assert any(reason in problem for problem in missing(mesh(*records), model="tiny", expected=()))


def test_the_least_loaded_way_wins() -> None:
    """Load is that of both workers of a pair; a mixed worker's counts twice."""
    pairs = (worker("prefill-0"), worker("decode-0", running=3), worker("decode-1", running=1))
    links = (link("prefill-0", "decode-0"), link("prefill-0", "decode-1"))
    assert place(mesh(*pairs, *links), Loads(), placing()) == pair("prefill-0", "decode-1")
    busy = mesh(*pairs, *links, worker("mixed-0", running=1))
    assert place(busy, Loads(), placing()) == pair("prefill-0", "decode-1")
    idle = mesh(*pairs, *links, worker("mixed-0"))
    assert place(idle, Loads(), placing()) == MixedRoute(mixed=ref_of(worker("mixed-0")))


def test_own_counts_hold_against_stale_records() -> None:
    """Requests that were placed after a worker wrote its record count, and are gone without a trace once they end."""
    records = mesh(worker("mixed-0"), worker("mixed-1"))
    loads = Loads()
    loads.add(ref_of(records.workers["mixed-0"]))
    for turn in range(2):
        assert place(records, loads, placing(turn=turn)) == MixedRoute(mixed=ref_of(records.workers["mixed-1"]))
    loads.remove(ref_of(records.workers["mixed-0"]))
    assert loads.counts == {}


def test_equals_take_turns() -> None:
    """Idle workers share one request after another."""
    records = mesh(worker("mixed-0"), worker("mixed-1"), worker("mixed-2"))
    routes = [place(records, Loads(), placing(turn=turn)) for turn in range(6)]
    assert routes[:3] == routes[3:]
    assert len({route.mixed for route in routes if isinstance(route, MixedRoute)}) == 3


def test_blamed_workers_come_last() -> None:
    """A worker that has just refused is tried again only if there is no other that is less to blame."""
    records = mesh(worker("mixed-0", running=2), worker("mixed-1"))
    first, second = (MixedRoute(mixed=ref_of(records.workers[name])) for name in ("mixed-0", "mixed-1"))
    assert place(records, Loads(), placing(blame={second.mixed: 1})) == first
    assert place(records, Loads(), placing(blame={first.mixed: 1, second.mixed: 1})) == second


def test_a_dead_worker_with_room_comes_after_a_full_one() -> None:
    """The record of a killed decode worker shows free memory until it expires: attempts must not all be spent on it."""
    full = WorkerLoad(num_free_blocks=0, num_free_slots=0, num_waiting=3, num_running=4)
    records = mesh(
        worker("prefill-0"),
        worker("decode-0"),
        worker("decode-1", load=full),
        link("prefill-0", "decode-0"),
        link("prefill-0", "decode-1"),
    )
    lost, busy = (PdmeshError("no", code=code) for code in (ErrorCode.WORKER_LOST, ErrorCode.OVERLOADED))
    prefill, *decodes = (ref_of(records.workers[name]) for name in ("prefill-0", "decode-0", "decode-1"))
    blamed = Counter(blame(lost, (prefill, decodes[0])))
    for _ in range(3):
        route = place(records, Loads(), placing(blame=blamed))
        assert isinstance(route, DisaggregatedRoute)
        assert route.decode.worker_id == "decode-1"
        blamed.update(blame(busy, (prefill, decodes[1])))


def test_full_workers_come_after_those_with_room() -> None:
    """Without free slots or blocks the request would only be refused there."""
    full = WorkerLoad(num_free_blocks=100, num_free_slots=0, num_waiting=0, num_running=0)
    tight = WorkerLoad(num_free_blocks=1, num_free_slots=4, num_waiting=0, num_running=0)
    records = mesh(worker("mixed-0", load=full), worker("mixed-1", running=3), worker("mixed-2", load=tight))
    assert place(records, Loads(), placing(num_prompt_tokens=20)) == MixedRoute(
        mixed=ref_of(records.workers["mixed-1"])
    )


@pytest.mark.parametrize(
    ("rooms", "chosen"),
    [
        (((3, 1), (3, 1)), "decode-1"),
        (((4, 0), (0, 4)), "decode-1"),
        (((0, 0), (4, 1)), "decode-0"),
        ((), "decode-0"),
    ],
    ids=["in no replica alone", "blocks here, slots there", "in one replica", "one that does not say"],
)
def test_room_is_what_one_replica_has(rooms: tuple[tuple[int, int], ...], chosen: str) -> None:
    """A sequence lives in one replica: what several have left together is no room for it. 50 tokens take 4 blocks."""
    replicas = tuple(ReplicaRoom(num_free_blocks=blocks, num_free_slots=slots) for blocks, slots in rooms)
    load = WorkerLoad(num_free_blocks=6, num_free_slots=4, num_waiting=0, num_running=0, replicas=replicas)
    records = mesh(
        worker("prefill-0"),
        worker("decode-0", dp=2, load=load),
        worker("decode-1", running=2),
        link("prefill-0", "decode-0"),
        link("prefill-0", "decode-1"),
    )
    assert place(records, Loads(), placing(num_prompt_tokens=40, max_tokens=10)) == pair("prefill-0", chosen)


def test_a_prefill_worker_needs_room_for_the_prompt() -> None:
    """It computes the prompt in one of its replicas, where the prompt would wait; the answer needs no room there."""
    replicas = (ReplicaRoom(num_free_blocks=2, num_free_slots=1),) * 2
    load = WorkerLoad(num_free_blocks=4, num_free_slots=2, num_waiting=0, num_running=0, replicas=replicas)
    records = mesh(
        worker("prefill-0", dp=2, load=load),
        worker("prefill-1", running=2),
        worker("decode-0"),
        link("prefill-0", "decode-0"),
        link("prefill-1", "decode-0"),
    )
    assert place(records, Loads(), placing(num_prompt_tokens=32, max_tokens=900)) == pair("prefill-0", "decode-0")
    assert place(records, Loads(), placing(num_prompt_tokens=33)) == pair("prefill-1", "decode-0")


def test_prompts_that_fit_nowhere_are_refused_for_good() -> None:
    """Not "try later": 413, or 400 where a shorter answer would do. A smaller worker is passed over for a larger one."""
    records = mesh(worker("mixed-0", max_sequence_tokens=20), worker("mixed-1", running=3, max_sequence_tokens=50))
    assert largest_sequence(records, model="tiny") == 50
    assert place(records, Loads(), placing(num_prompt_tokens=30)) == MixedRoute(
        mixed=ref_of(records.workers["mixed-1"])
    )
    for num_prompt_tokens, code in ((49, ErrorCode.CONTEXT_LENGTH), (50, ErrorCode.PROMPT_TOO_LONG)):
        with pytest.raises(PdmeshError, match="the largest holds 50") as caught:
            place(records, Loads(), placing(num_prompt_tokens=num_prompt_tokens))
        assert caught.value.code is code


def test_prefill_holds_the_prompt_only() -> None:
    """Room for the answer is needed on the decode side alone."""
    records = mesh(worker("prefill-0", max_sequence_tokens=40), worker("decode-0"), link("prefill-0", "decode-0"))
    assert place(records, Loads(), placing(num_prompt_tokens=40, max_tokens=900)) == pair("prefill-0", "decode-0")
    with pytest.raises(PdmeshError, match="prompts of 40"):
        place(records, Loads(), placing(num_prompt_tokens=41))


def test_expected_workers_must_be_there_ready_and_linked() -> None:
    """Each gap is named; nothing missing means ready."""
    expected = ("prefill-0", "decode-0", "decode-1")
    records: list[WorkerRecord | LinkRecord] = [worker("prefill-0"), worker("decode-0"), link("prefill-0", "decode-0")]
    assert missing(mesh(*records), model="tiny", expected=expected) == ["decode-1 has not registered"]
    records.append(worker("decode-1"))
    assert missing(mesh(*records), model="tiny", expected=expected) == ["prefill-0 is not linked to decode-1 yet"]
    records.append(link("prefill-0", "decode-1"))
    assert missing(mesh(*records), model="tiny", expected=expected) == []
