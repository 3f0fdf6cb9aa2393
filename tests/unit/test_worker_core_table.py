"""Which handoffs a worker knows, and which commands it refuses because of that."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from common.worker.core import table as table_module
from common.worker.core.admission import Room, refuse_command, refuse_new
from common.worker.core.sequence import Sequence
from common.worker.core.table import HandoffTable
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import RunMixed
from contracts.requests import SamplingParams

SAMPLING = SamplingParams(max_tokens=8, seed=1)
RUN = RunMixed(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    incarnation="i1",
    fence=4,
    num_prompt_tokens=40,
    prompt_hash="h",
    sampling=SAMPLING,
    timeout_ms=1000,
)
ROOM = Room(worker_id="w0", draining=False, max_sequence_tokens=48, num_waiting=2, max_waiting=3)


def sequence(seq: int) -> Sequence:
    """A sequence of handoff `h<seq>`."""
    return Sequence(
        seq=seq,
        handoff_id=f"h{seq}",
        request_id=f"r{seq}",
        attempt=0,
        router_id="router-0",
        num_prompt_tokens=4,
        sampling=SAMPLING,
    )


def test_a_sequence_is_found_by_handoff_and_by_number_until_it_is_removed() -> None:
    """Numbers are given once, from 1; the one that lived is returned, the second time none."""
    table = HandoffTable()
    assert [table.next_seq(), table.next_seq()] == [1, 2]
    one, two = sequence(1), sequence(2)
    table.add(one)
    table.add(two)
    assert (len(table), table.sequences) == (2, (one, two))
    assert (table.get("h1"), table.by_seq(1), table.get("h3"), table.by_seq(3)) == (one, one, None, None)
    assert table.remove("h1", until=5.0) is one
    assert table.remove("h1", until=5.0) is None
    assert (table.get("h1"), table.by_seq(1), table.by_seq(2)) == (None, None, two)
    assert len(table) == 1
    assert table.next_seq() == 3


def test_a_removed_handoff_is_over_until_the_latest_of_its_moments() -> None:
    """Also one that was never known; a second release does not bring its end forward."""
    table = HandoffTable()
    assert not table.is_buried("h1")
    assert table.remove("h1", until=5.0) is None
    table.remove("h1", until=3.0)
    table.remove("h2", until=4.0)
    table.expire(now=4.0)
    assert (table.is_buried("h1"), table.is_buried("h2")) == (True, False)
    table.remove("h1", until=9.0)
    table.expire(now=5.0)
    assert table.is_buried("h1")
    table.expire(now=9.0)
    assert not table.is_buried("h1")
    table.remove("h3", until=0.5)
    table.expire(now=0.5)
    assert not table.is_buried("h3")


def test_of_too_many_that_are_over_the_longest_removed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is released again counts as new."""
    monkeypatch.setattr(table_module, "MAX_REMEMBERED", 2)
    table = HandoffTable()
    for name in ("a", "b", "a", "c"):
        table.remove(name, until=5.0)
    assert [table.is_buried(name) for name in ("a", "b", "c")] == [True, False, True]


def test_what_is_obeyed_raises_the_fence_and_a_look_does_not() -> None:
    """Whoever is below the highest fence that commanded is deposed."""
    table = HandoffTable()
    assert table.admits_fence(0)
    assert not table.is_deposed(0)
    assert table.admits_fence(3)
    assert table.admits_fence(3)
    assert not table.admits_fence(2)
    assert (table.is_deposed(2), table.is_deposed(3), table.is_deposed(4)) == (True, False, False)
    assert (table.is_news(2), table.is_news(3), table.is_news(4)) == (False, False, True)
    assert table.admits_fence(3)


def test_a_command_that_must_not_be_obeyed_is_refused_with_its_reason() -> None:
    """For another start, of a deposed broker, or for what is over: in this order."""
    table = HandoffTable()
    assert refuse_command(RUN, incarnation="i1", table=table) is None
    assert refuse_command(RUN, incarnation="i2", table=table) == ErrorInfo(
        code=ErrorCode.INCARNATION_CHANGED, message="incarnation: 'i1' is gone; this worker is now 'i2'"
    )
    assert refuse_command(replace(RUN, fence=3), incarnation="i1", table=table) == ErrorInfo(
        code=ErrorCode.STALE_FENCE, message="fence: 3 is below the highest one seen"
    )
    table.remove("r1-0", until=5.0)
    assert refuse_command(RUN, incarnation="i1", table=table) == ErrorInfo(
        code=ErrorCode.CANCELLED, message="r1-0 has been released already"
    )
    assert refuse_command(replace(RUN, handoff_id="r2-0"), incarnation="i1", table=table) is None


def test_the_fence_of_another_starts_command_is_not_believed() -> None:
    """What is not meant for this start raises nothing."""
    table = HandoffTable()
    refuse_command(replace(RUN, fence=9), incarnation="i2", table=table)
    assert refuse_command(RUN, incarnation="i1", table=table) is None


@pytest.mark.parametrize(
    ("room", "delivered", "num_tokens", "code", "message"),
    [
        ({}, 40, 48, None, ""),
        (
            {},
            41,
            48,
            ErrorCode.PROTOCOL,
            "num_delivered_tokens: 41 is not allowed; the rule is: at most num_prompt_tokens = 40, whose end they are",
        ),
        ({"draining": True}, 0, 48, ErrorCode.DRAINING, "w0 is draining"),
        (
            {},
            0,
            49,
            ErrorCode.PROMPT_TOO_LONG,
            "num_prompt_tokens + max_tokens: 49 is not allowed; the rule is: at most 48 on w0",
        ),
        ({"max_prompt_tokens": 40}, 0, 48, None, ""),
        (
            {"max_prompt_tokens": 39},
            0,
            48,
            ErrorCode.PROMPT_TOO_LONG,
            (
                "num_prompt_tokens: 40 is not allowed; the rule is: at most 39 (max_step_tokens) on w0, "
                "which computes a prompt in one step: chunked_prefill is off there"
            ),
        ),
        ({"num_waiting": 3}, 0, 48, ErrorCode.OVERLOADED, "3 sequences wait for memory"),
        ({"num_waiting": 4}, 0, 48, ErrorCode.OVERLOADED, "4 sequences wait for memory"),
    ],
)
def test_new_work_is_refused_with_its_reason(
    room: dict[str, Any], delivered: int, num_tokens: int, code: ErrorCode | None, message: str
) -> None:
    """What fits just so is taken."""
    told = refuse_new(replace(RUN, num_delivered_tokens=delivered), num_tokens, replace(ROOM, **room))
    assert told == (None if code is None else ErrorInfo(code=code, message=message))
