"""What came of a worker's guesses is told once, with the release of its memory, whichever message brings it."""

from typing import Any

import pytest

from contracts.events import EventName
from contracts.guesses import Guesses
from contracts.handoff import RequestEnded
from contracts.requests import FinishReason
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.step import step
from tests.unit.test_broker_measured_prompts import STOPPED, running

GUESSES = Guesses(num_steps=5, drafted=(4, 3), accepted=(3, 1), draft_ms=1.5, verify_ms=6.0)
TOLD = {
    "num_steps": 5,
    "num_drafted": 7,
    "num_accepted": 4,
    "accepted_at": (3, 1),
    "draft_ms": 1.5,
    "verify_ms": 6.0,
}


def ended(guesses: Guesses | None) -> ev.WorkerEnded:
    """The worker's own end."""
    return ev.WorkerEnded(
        at_ns=4,
        message=RequestEnded(
            handoff_id="r1-0",
            incarnation="im",
            num_tokens=9,
            finish_reason=FinishReason.LENGTH,
            guesses=guesses,
        ),
    )


def settled(guesses: Guesses | None) -> ev.ReleaseSettled:
    """Its answer to a release."""
    return ev.ReleaseSettled(at_ns=5, role=WorkerRole.MIXED, acknowledged=True, rpc_ms=1.0, guesses=guesses)


def released(*happened: ev.Event) -> list[dict[str, Any]]:
    """The fields of the events that tell of the release, while these things happen and every write is stored at once."""
    handoff, found = running(), list[dict[str, Any]]()
    queue = list(happened)
    while queue:
        handoff, effects = step(handoff, queue.pop(0))
        for effect in effects:
            if isinstance(effect, fx.Publish) and effect.name is EventName.DECODE_RELEASED:
                found.append({key: value for key, value in effect.fields.items() if key in TOLD})
            if isinstance(effect, fx.StoreRecord):
                queue.insert(0, ev.RecordStored(at_ns=3, write=effect.write, revision=effect.write + 1))
    return found


@pytest.mark.parametrize(
    "happened",
    [(ended(GUESSES), ended(GUESSES)), (STOPPED, settled(GUESSES)), (STOPPED, ended(GUESSES), settled(GUESSES))],
    ids=["an end that comes twice", "a release", "both, which cross"],
)
def test_guesses_are_told_once(happened: tuple[ev.Event, ...]) -> None:
    """With the first word of the release."""
    assert released(*happened) == [TOLD]


def test_of_a_request_for_which_nothing_was_guessed_nothing_is_told() -> None:
    """The event has no such fields then."""
    assert released(ended(None)) == released(STOPPED, settled(None)) == [{}]
