"""What a router says when no way holds a request, and the counts by which it chooses, waits and tries again."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.links import LinkRecord, LinkState
from contracts.requests import DisaggregatedRoute, MixedRoute, WorkerRef
from contracts.subjects import link_key
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.router.core.mesh_view import MeshView
from services.router.core.placement import (
    Loads,
    Placing,
    largest_sequence,
    place,
    ref_of,
    why_no_way,
    workers_of,
)
from services.router.core.prompt_frames import MAX_FRAME_B64_BYTES, pack_ids, prompt_frames, prompt_hash
from services.router.core.readiness import missing
from services.router.core.retry import Failures, RetryPolicy, blame

LOST = PdmeshError("gone", code=ErrorCode.WORKER_LOST)
PREEMPTED = PdmeshError("gave way", code=ErrorCode.PREEMPTED)
POLICY = RetryPolicy(max_attempts=3, max_failures=5, max_preemptions=2, first_delay_s=1.0, max_delay_s=6.0)


def worker(worker_id: str, *, running: int = 0, waiting: int = 0, **says: Any) -> WorkerRecord:
    """A record; the role is the beginning of the id."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": "i",
        "role": WorkerRole(worker_id.partition("-")[0]),
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
        "load": WorkerLoad(num_free_blocks=100, num_free_slots=4, num_waiting=waiting, num_running=running),
    }
    return WorkerRecord(**(values | says))


def mesh(*workers: WorkerRecord, links: tuple[tuple[str, str], ...] = ()) -> MeshView:
    """A view with these workers, of which some are linked."""
    refs = {each.worker_id: ref_of(each) for each in workers}
    return MeshView(
        {each.worker_id: each for each in workers},
        {
            link_key(prefill, decode): LinkRecord(
                prefill=refs[prefill], decode=refs[decode], state=LinkState.LINKED, since="2030-01-01T00:00:00+00:00"
            )
            for prefill, decode in links
        },
    )


def refused(view: MeshView, num_prompt_tokens: int, max_tokens: int = 5) -> tuple[ErrorCode, str | None, str]:
    """Code, parameter and text of the refusal."""
    with pytest.raises(PdmeshError) as caught:
        place(view, Loads(), Placing(model="tiny", num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens))
    return caught.value.code, caught.value.info.param, caught.value.message


def test_a_request_that_fits_nowhere_is_refused_by_what_is_too_long() -> None:
    """The answer, where a shorter one would do; else the prompt; with the largest of both that there are."""
    view = mesh(worker("mixed-0", max_sequence_tokens=20), worker("mixed-1", max_sequence_tokens=50))
    text = "prompt: {} tokens and 5 to generate fit on no worker; the largest holds 50, and prompts of 50"
    assert refused(view, 49) == (ErrorCode.CONTEXT_LENGTH, "max_tokens", text.format(49))
    assert refused(view, 50) == (ErrorCode.PROMPT_TOO_LONG, "prompt", text.format(50))


def test_workers_that_could_hold_a_prompt_but_not_compute_it_are_named() -> None:
    """In the order of their ids, and only those whose steps are what is too small."""
    whole = {"max_sequence_tokens": 100, "max_prompt_tokens": 40}
    view = mesh(worker("mixed-1", **whole), worker("mixed-0", **whole), worker("mixed-2", max_sequence_tokens=30))
    text = "prompt: {} tokens and 5 to generate fit on no worker; the largest holds 100, and prompts of 40"
    names = "; computed in one step, because chunked_prefill is off: mixed-0, mixed-1"
    assert refused(view, 41) == (ErrorCode.PROMPT_TOO_LONG, "prompt", text.format(41) + names)
    assert refused(view, 100) == (ErrorCode.PROMPT_TOO_LONG, "prompt", text.format(100) + names)
    assert refused(view, 101) == (ErrorCode.PROMPT_TOO_LONG, "prompt", text.format(101))
    longer = "prompt: 40 tokens and 99 to generate fit on no worker; the largest holds 100, and prompts of 40"
    assert refused(view, 40, 99) == (ErrorCode.CONTEXT_LENGTH, "max_tokens", longer)


def test_what_a_complete_way_lacks_is_said_word_for_word() -> None:
    """Worker by worker in the order of ids, then what is missing."""
    assert why_no_way(mesh(), "tiny") == "no worker is ready"
    view = mesh(
        worker("prefill-0"),
        worker("decode-0"),
        worker("decode-1", model="other"),
        worker("mixed-0", state=WorkerState.DRAINING),
    )
    assert why_no_way(view, "tiny") == (
        "decode-1 serves 'other', not 'tiny'; mixed-0 is draining; prefill-0 is not linked to decode-0 yet; "
        "no prefill worker is linked to a decode worker"
    )
    assert why_no_way(mesh(worker("decode-0")), "tiny") == "no prefill worker is ready"
    assert why_no_way(mesh(worker("prefill-0")), "tiny") == "no decode worker is ready"
    assert largest_sequence(mesh(worker("prefill-0")), model="tiny") is None
    assert missing(mesh(worker("mixed-0", state=WorkerState.DRAINING)), model="tiny", expected=("mixed-0",)) == [
        "mixed-0 is draining"
    ]


def test_own_requests_are_counted_in_and_out() -> None:
    """A worker of which none is left is forgotten; the larger of both counts holds, by slot."""
    record = worker("mixed-0", running=1, waiting=1)
    ref = ref_of(record)
    loads = Loads()
    assert loads.of(record) == 0.5
    for _ in range(3):
        loads.add(ref)
    assert loads.of(record) == 0.75
    loads.remove(ref)
    assert (loads.counts, loads.of(record)) == ({ref: 2}, 0.5)
    loads.remove(ref)
    loads.remove(ref)
    assert loads.counts == {}
    assert loads.of(worker("mixed-0", running=1, waiting=1, num_slots=1)) == 2.0


def test_the_workers_of_a_route_are_in_the_order_of_its_work() -> None:
    """Whoever computes the prompt first, whoever decodes last."""
    first, second = (WorkerRef(worker_id=name, incarnation="i") for name in ("p", "d"))
    assert workers_of(DisaggregatedRoute(prefill=first, decode=second)) == (first, second)
    assert workers_of(MixedRoute(mixed=first)) == (first,)


def test_failures_in_a_row_begin_anew_with_a_token() -> None:
    """The one that came behind the token is the first of them; preemptions are no failures."""
    failures = Failures()
    for delivered in (False, False, True, False):
        failures.note(LOST, delivered=delivered)
    failures.note(PREEMPTED, delivered=True)
    assert (failures.num_in_a_row, failures.num_in_all, failures.num_preempted) == (2, 4, 1)
    failures.note(LOST, delivered=True)
    assert (failures.num_in_a_row, failures.num_in_all) == (1, 5)


@pytest.mark.parametrize(
    ("error", "failures", "delay_s"),
    [
        (LOST, Failures(num_in_a_row=1, num_preempted=3), 1.0),
        (LOST, Failures(num_in_a_row=3, num_preempted=1), 4.0),
        (LOST, Failures(num_in_a_row=9), 6.0),
        (PREEMPTED, Failures(num_in_a_row=3, num_preempted=1), 1.0),
        (PREEMPTED, Failures(num_in_a_row=1, num_preempted=2), 2.0),
    ],
)
def test_pauses_double_with_what_failed_in_the_same_way(error: PdmeshError, failures: Failures, delay_s: float) -> None:
    """Up to a bound; chance takes away up to half."""
    assert POLICY.delay_s(error, failures, chance=1.0) == delay_s
    assert POLICY.delay_s(error, failures, chance=0.0) == delay_s / 2


def test_of_a_preemption_only_the_worker_that_decodes_is_to_blame() -> None:
    """Whoever computed the prompt had nothing to do with it."""
    route = [WorkerRef(worker_id=f"w{n}", incarnation="i") for n in range(3)]
    assert blame(PREEMPTED, route) == {route[2]: 1}
    assert blame(LOST, route) == dict.fromkeys(route, 1000)


def test_a_prompt_travels_in_frames_that_all_say_what_it_is() -> None:
    """Each at most so long, the last one shorter; together they are the packed ids."""
    packed = pack_ids(range(40_000))
    frames = list(prompt_frames(packed, handoff_id="r1-0", digest=prompt_hash(packed), timeout_ms=7))
    assert [(each.index, len(each.ids_b64)) for each in frames] == [(0, MAX_FRAME_B64_BYTES), (1, 82_264)]
    assert b"".join(base64.b64decode(each.ids_b64) for each in frames) == packed
    assert {
        (each.handoff_id, each.num_frames, each.num_prompt_tokens, each.prompt_hash, each.timeout_ms) for each in frames
    } == {("r1-0", 2, 40_000, prompt_hash(packed), 7)}
    assert all(type(each.num_prompt_tokens) is int for each in frames)
