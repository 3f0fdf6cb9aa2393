"""What a broker refuses before anything is written: submits that cannot be, and pairs that prefill workers have refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.links import LinkRecord, LinkState
from contracts.requests import MixedRoute, SamplingParams, SubmitRequest, WorkerRef
from services.broker.core import link_verdicts
from services.broker.core.deadline_text import moment_before, seconds_left, write_deadline
from services.broker.core.link_verdicts import LinkVerdicts
from services.broker.core.submission import check_submit
from tests.unit.broker_steps import DECODE, PREFILL, submitted

SUBMIT = submitted().submit
MIXED = WorkerRef(worker_id="m0", incarnation="im")
ZERO = "is not allowed; the rule is: 1 or more"
RULE = "1 to 63 characters of a-z, 0-9, '_' and '-', not starting with '_' or '-'"


def check(submit: SubmitRequest, *replaced: WorkerRef, gone: tuple[WorkerRef, ...] = ()) -> None:
    """Check a submit where these starts of workers were replaced, and those have fallen silent."""
    check_submit(
        submit,
        is_replaced=lambda worker: worker in replaced,
        is_gone=lambda worker: worker in gone,
        max_timeout_ms=3_600_000,
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"router_id": "Router"}, f"router_id: 'Router' is not allowed; the rule is: {RULE}"),
        (
            {"route": MixedRoute(mixed=WorkerRef(worker_id="M0", incarnation="i"))},
            f"worker_id: 'M0' is not allowed; the rule is: {RULE}",
        ),
        ({"handoff_id": "r1-1"}, "handoff_id: 'r1-1' is not allowed; the rule is: r1-0: request and attempt"),
        ({"num_prompt_tokens": 0}, f"num_prompt_tokens: 0 {ZERO}"),
        ({"timeout_ms": 0}, f"timeout_ms: 0 {ZERO}"),
        ({"sampling": SamplingParams(max_tokens=0, seed=1)}, f"sampling.max_tokens: 0 {ZERO}"),
        (
            {"num_delivered_tokens": 40},
            "num_delivered_tokens: 40 is not allowed; the rule is: less than num_prompt_tokens, 40: they are the end of the prompt",
        ),
    ],
)
def test_a_submit_that_cannot_be_is_refused_word_for_word(changes: dict[str, Any], text: str) -> None:
    """The field, its value and the rule; what is just within the bounds is taken."""
    least = SamplingParams(max_tokens=1, seed=1)
    check(replace(SUBMIT, num_prompt_tokens=1, timeout_ms=1, sampling=least))
    check(replace(SUBMIT, num_delivered_tokens=39))
    check(replace(SUBMIT, route=MixedRoute(mixed=MIXED)))
    with pytest.raises(InvalidValueError) as caught:
        check(replace(SUBMIT, **changes))
    assert str(caught.value) == text


def test_a_request_that_would_outlive_its_record_is_nobodys_fault_but_the_settings() -> None:
    """No client chose its time: the text says what to set, and the code that the client need not look at its request."""
    check(replace(SUBMIT, timeout_ms=3_600_000))
    with pytest.raises(PdmeshError) as caught:
        check(replace(SUBMIT, timeout_ms=3_600_001))
    rule = "at most 3600000, the record_ttl_s of the broker: no request outlives its record"
    text = f"timeout_ms: 3600001 is not allowed; the rule is: {rule}; lower request_timeout_s of the router"
    assert (caught.value.code, str(caught.value)) == (ErrorCode.INTERNAL, text)


@pytest.mark.parametrize("worker", [PREFILL, DECODE])
def test_a_start_that_was_replaced_is_named(worker: WorkerRef) -> None:
    """Either worker of the route."""
    check(SUBMIT, MIXED)
    with pytest.raises(PdmeshError) as caught:
        check(SUBMIT, worker)
    assert caught.value.code is ErrorCode.INCARNATION_CHANGED
    assert str(caught.value) == f"incarnation: {worker.incarnation!r} of {worker.worker_id} is gone"


def test_a_start_that_has_fallen_silent_is_named() -> None:
    """Its work would be failed at once: the router had better choose another one."""
    with pytest.raises(PdmeshError) as caught:
        check(SUBMIT, gone=(DECODE,))
    assert (caught.value.code, str(caught.value)) == (ErrorCode.WORKER_LOST, "d0 (id) is gone")


def record(state: LinkState, *, decode: WorkerRef = DECODE) -> LinkRecord:
    """What a prefill worker says of a pair."""
    return LinkRecord(prefill=PREFILL, decode=decode, state=state, since="2030", reason="other weights")


def test_a_refused_pair_and_one_that_ends_are_told_apart() -> None:
    """By code and text; any other pair, or other starts of these two, may be tried."""
    verdicts = LinkVerdicts()
    verdicts.check(PREFILL, DECODE, "p0.d0")
    verdicts.heard("p0.d0", record(LinkState.REFUSED))
    with pytest.raises(PdmeshError) as caught:
        verdicts.check(PREFILL, DECODE, "p0.d0")
    assert str(caught.value) == "p0 and d0 are not linked: other weights"
    assert caught.value.code is ErrorCode.INCOMPATIBLE_WORKERS
    verdicts.check(PREFILL, replace(DECODE, incarnation="new"), "p0.d0")
    verdicts.check(replace(PREFILL, incarnation="new"), DECODE, "p0.d0")
    verdicts.check(PREFILL, DECODE, "p0.d1")
    verdicts.heard("p0.d0", record(LinkState.UNLINKING))
    with pytest.raises(PdmeshError) as caught:
        verdicts.check(PREFILL, DECODE, "p0.d0")
    assert str(caught.value) == "p0 and d0 are being unlinked"
    assert caught.value.code is ErrorCode.DRAINING
    for state in (LinkState.LINKED, LinkState.MEETING):
        verdicts.heard("p0.d0", record(LinkState.REFUSED))
        verdicts.heard("p0.d0", record(state))
        verdicts.heard("p0.d9", record(state))
        assert len(verdicts) == 0
        verdicts.check(PREFILL, DECODE, "p0.d0")


def test_verdicts_are_forgotten_with_their_key_or_one_of_their_workers() -> None:
    """Unknown ones are fine."""
    other = replace(DECODE, worker_id="d1")
    for forget in ("left", "prefill", "decode"):
        verdicts = LinkVerdicts()
        verdicts.heard("p0.d0", record(LinkState.REFUSED))
        verdicts.heard("p0.d1", record(LinkState.REFUSED, decode=other))
        verdicts.drop(replace(DECODE, incarnation="new"))
        verdicts.left("p0.d7")
        assert len(verdicts) == 2
        match forget:
            case "left":
                verdicts.left("p0.d0")
            case "prefill":
                verdicts.drop(PREFILL)
            case _:
                verdicts.drop(DECODE)
        assert len(verdicts) == (0 if forget == "prefill" else 1)
        verdicts.check(PREFILL, DECODE, "p0.d0")


def test_of_too_many_verdicts_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket may hold whatever somebody has written into it."""
    monkeypatch.setattr(link_verdicts, "MAX_VERDICTS", 2)
    verdicts = LinkVerdicts()
    for key in ("a", "b", "c"):
        verdicts.heard(key, record(LinkState.REFUSED))
    assert len(verdicts) == 2
    verdicts.check(PREFILL, DECODE, "a")
    for key in ("b", "c"):
        with pytest.raises(PdmeshError):
            verdicts.check(PREFILL, DECODE, key)


def test_a_deadline_is_wall_time_for_everybody() -> None:
    """In UTC and to the millisecond; what has passed leaves nothing."""
    text = write_deadline(1_893_456_000.1234)
    assert text == "2030-01-01T00:00:00.123+00:00"
    assert moment_before(text, 1.5) == "2029-12-31T23:59:58.623+00:00"
    assert seconds_left(text, 1_893_456_000.0) == pytest.approx(0.123)
    assert seconds_left(text, 1_893_455_990.0) == pytest.approx(10.123)
    assert seconds_left(text, 1_893_456_001.0) == 0.0
    with pytest.raises(ValueError, match="tomorrow"):
        seconds_left("tomorrow", 0.0)
