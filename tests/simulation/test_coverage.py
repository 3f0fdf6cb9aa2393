"""What no schedule can reach must be harmless all the same: the machine passes over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import Grant, HandoffState, PrefillFinished, Reserved
from contracts.requests import FinishReason
from contracts.workers import WorkerRole
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from tests.simulation import __main__ as command
from tests.simulation.campaign import Campaign
from tests.simulation.coverage import (
    EFFECTS,
    ENOUGH_FOR_EFFECTS,
    ENOUGH_SCHEDULES,
    UNREACHABLE,
    Pair,
    coverage_lines,
    every_pair,
    never_reached,
    not_seen,
    pair_of,
)
from tests.unit.broker_steps import adopted, adopting, record, reserved, reserving

_LOST: Final = ErrorInfo(code=ErrorCode.WORKER_LOST, message="nobody listens")
_GRANT: Final = Grant(worker_id="d0", incarnation="id", generation=8, block_ids=(9,), slot=2)

EVENTS: Final[dict[str, ev.Event]] = {
    "PlanFound": ev.PlanFound(at_ns=0, planned=(), block_size=16),
    "DecodeReserved": ev.DecodeReserved(
        at_ns=0, answer=Reserved(handoff_id="r1-0", grant=_GRANT, num_cached_tokens=0, prepare_ms=0.0), rpc_ms=1.0
    ),
    "PullAccepted": ev.PullAccepted(at_ns=0, rpc_ms=1.0),
    "CommitAccepted": ev.CommitAccepted(at_ns=0, rpc_ms=1.0),
    "PartsUnanswered": ev.PartsUnanswered(at_ns=0, role=WorkerRole.PREFILL, error=_LOST),
    "PartsOverdue": ev.PartsOverdue(at_ns=0),
    "DeadlinePassed": ev.DeadlinePassed(at_ns=0),
}
"""One of each kind that some state cannot meet."""


def written(handoff: Handoff) -> Handoff:
    """The same, once the bucket has taken what is being written."""
    while handoff.writing is not None:
        event = ev.RecordStored(at_ns=0, write=handoff.num_writes, revision=handoff.revision + 1)
        handoff, _ = step(handoff, event)
    return handoff


def prefilling() -> Handoff:
    """Decode has reserved; prefill has been asked to run."""
    return written(reserved(reserving())[0])


def finished() -> Handoff:
    """The first token ended the request."""
    message = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5, finish_reason=FinishReason.STOP)
    return written(step(prefilling(), ev.PrefillEnded(at_ns=0, message=message))[0])


def cancelled() -> Handoff:
    """Nobody waits any more."""
    return written(step(prefilling(), ev.CancelRequested(at_ns=0, reason="the client left"))[0])


def failed() -> Handoff:
    """Prefill could not be reached."""
    return written(step(prefilling(), ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=_LOST))[0])


def of_another_broker(state: HandoffState) -> Callable[[], Handoff]:
    """A broker has found the record in this state."""
    return lambda: written((adopting if state.terminal else adopted)(state)[0])  # what is over is not claimed


LIVES: Final[dict[str, tuple[Callable[[], Handoff], ...]]] = {
    "reserving": (reserving, of_another_broker(HandoffState.RESERVING)),
    "prefilling": (prefilling, of_another_broker(HandoffState.PREFILLING)),
    "committed": (of_another_broker(HandoffState.COMMITTED),),
    "decoding": (of_another_broker(HandoffState.DECODING),),
    "finished": (finished, of_another_broker(HandoffState.FINISHED)),
    "cancelled": (cancelled, of_another_broker(HandoffState.CANCELLED)),
    "failed": (failed, of_another_broker(HandoffState.FAILED)),
}
"""How a handoff comes into each state."""


@pytest.mark.parametrize(
    ("pair", "life"),
    [
        pytest.param(pair, life, id=f"{pair[0]} {pair[1]} {number}")
        for pair in UNREACHABLE
        for number, life in enumerate(LIVES[pair[0]])
    ],
)
def test_what_cannot_be_reached_changes_nothing(pair: Pair, life: Callable[[], Handoff]) -> None:
    """Were it reached, nobody would be asked for anything, and who owns the request's memory would stay as it is."""
    handoff, event = life(), EVENTS[pair[1]]
    assert pair_of(handoff, event) == pair
    after, effects = step(handoff, event)
    assert after == handoff
    assert effects == ()


def test_each_pair_is_either_to_be_reached_or_not() -> None:
    """A reason is given for pairs that exist, and a campaign that saw nothing names all others."""
    every = set(every_pair())
    assert UNREACHABLE.keys() <= every
    assert set(never_reached(set())) == every - UNREACHABLE.keys()


def test_a_campaign_says_what_it_missed() -> None:
    """The list at its end counts what was reached, and names what was not."""
    pairs = Counter({pair: 3 for pair in never_reached(set()) if pair != ("committed", "RecordConflict")})
    lines = list(coverage_lines(pairs, Counter(takeover=7)))
    assert "134 of 135 pairs" in lines[0]
    assert [line.strip() for line in lines if "never reached" in line] == ["never reached: committed, RecordConflict"]
    assert lines[-1].split() == ["7", "takeover"]


@pytest.mark.parametrize(
    ("num_schedules", "misses", "failures", "status"),
    [
        (ENOUGH_SCHEDULES, True, {}, 1),
        (ENOUGH_SCHEDULES, False, {}, 0),
        (ENOUGH_SCHEDULES - 1, True, {}, 0),
        (ENOUGH_SCHEDULES - 1, True, {7: ["I1"]}, 1),
    ],
)
def test_a_large_campaign_fails_for_what_it_missed(
    monkeypatch: pytest.MonkeyPatch, num_schedules: int, misses: bool, failures: dict[int, list[str]], status: int
) -> None:
    """The exit status says so, and that an invariant was broken; a small one cannot reach everything."""
    reached = Counter(dict.fromkeys(never_reached(set()), 1))
    if misses:
        del reached["committed", "RecordConflict"]
    happened = Counter(dict.fromkeys(EFFECTS, 1))
    found = Campaign(num_schedules=num_schedules, failures=failures, pairs=reached, seen=happened)

    def run_campaign(_seeds: range, *, jobs: int) -> Iterator[Campaign]:
        assert jobs == 1
        yield found

    monkeypatch.setattr(command, "run_campaign", run_campaign)
    assert command.main(["--jobs", "1"]) == status


@pytest.mark.parametrize(("num_schedules", "status"), [(ENOUGH_FOR_EFFECTS, 1), (ENOUGH_FOR_EFFECTS - 1, 0)])
def test_a_campaign_fails_for_faults_that_did_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_schedules: int, status: int
) -> None:
    """A fault that is played and does nothing shows nothing: what it is there for must have happened."""
    happened = Counter(dict.fromkeys(EFFECTS, 1)) - Counter(transfer_late=1)
    found = Campaign(num_schedules=num_schedules, seen=happened)
    monkeypatch.setattr(command, "run_campaign", lambda _seeds, jobs: iter([found] * jobs))
    assert command.main(["--jobs", "1"]) == status
    assert ("must happen, and did not: transfer_late" in capsys.readouterr().out) == bool(status)
    assert not_seen(ENOUGH_FOR_EFFECTS, happened) == ["transfer_late"]


def test_what_comes_after_a_handoff_made_way_is_no_pair() -> None:
    """Its state is that of another broker's handoff, and whatever comes is dropped."""
    handoff = reserving()
    found = step(handoff, ev.CancelRequested(at_ns=0, reason="the client left"))[0]
    other = msgspec.structs.replace(record(HandoffState.COMMITTED), fence=99)
    conflict = ev.RecordConflict(at_ns=0, write=found.num_writes, found=other, revision=9)
    after, _ = step(found, conflict)
    assert pair_of(after, EVENTS["PlanFound"]) is None
    assert step(after, EVENTS["PlanFound"]) == (after, ())
