"""Who is alive, from what is heard and from silence."""

from __future__ import annotations

from contracts.requests import WorkerRef
from services.broker.core.leases import MAX_GONE, Leases

FIRST = WorkerRef(worker_id="decode-0", incarnation="i1")
SECOND = WorkerRef(worker_id="decode-0", incarnation="i2")


def test_silence_ends_a_lease_once() -> None:
    """A worker that was not heard of for its time to live is gone, and is named once."""
    leases = Leases(ttl_s=6.0)
    assert leases.heard(FIRST, 0.0) is None
    assert leases.heard(FIRST, 2.0) is None
    assert leases.expire(7.9) == ()
    assert leases.expire(8.0) == (FIRST,)
    assert leases.expire(9.0) == ()
    assert leases.is_gone(FIRST)


def test_another_start_replaces_the_one_before() -> None:
    """The new incarnation names the old one as gone."""
    leases = Leases(ttl_s=6.0)
    leases.heard(FIRST, 0.0)
    assert leases.heard(SECOND, 1.0) == FIRST
    assert leases.is_replaced(FIRST)
    assert leases.is_gone(FIRST)
    assert not leases.is_replaced(SECOND)


def test_signing_off_is_being_gone() -> None:
    """Twice is fine."""
    leases = Leases(ttl_s=6.0)
    leases.heard(FIRST, 0.0)
    assert leases.signed_off("decode-0") == FIRST
    assert leases.signed_off("decode-0") is None
    assert leases.is_gone(FIRST)
    assert not leases.is_replaced(FIRST)


def test_a_worker_that_wakes_is_not_gone() -> None:
    """A start that is heard of again lives."""
    leases = Leases(ttl_s=6.0)
    leases.heard(FIRST, 0.0)
    leases.expire(6.0)
    leases.heard(FIRST, 7.0)
    assert not leases.is_gone(FIRST)


def test_no_verdict_after_an_outage() -> None:
    """When nobody could be heard, silence says nothing for twice the time to live."""
    leases = Leases(ttl_s=6.0)
    leases.heard(FIRST, 0.0)
    leases.outage_until(10.0)
    assert leases.expire(21.9) == ()
    assert leases.expire(22.0) == (FIRST,)


def test_the_list_of_the_gone_is_bounded() -> None:
    """The oldest are forgotten."""
    leases = Leases(ttl_s=6.0)
    refs = [WorkerRef(worker_id="decode-0", incarnation=f"i{n}") for n in range(MAX_GONE + 2)]
    for ref in refs:
        leases.heard(ref, 0.0)
    assert not leases.is_gone(refs[0])
    assert leases.is_gone(refs[1])
    assert leases.is_gone(refs[MAX_GONE])
