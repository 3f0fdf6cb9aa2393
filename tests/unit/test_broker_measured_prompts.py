"""What a mixed worker says of its prompt is counted once, whichever message brings it, however often."""

from contracts.handoff import PromptTimes, RequestEnded
from contracts.requests import FinishReason, MixedRoute, SamplingParams, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import begin, step

MIXED = WorkerRef(worker_id="mixed-0", incarnation="im")
TIMES = PromptTimes(queue_ms=1.0, compute_ms=2.0)
ENDED = ev.WorkerEnded(
    at_ns=4,
    message=RequestEnded(
        handoff_id="r1-0", incarnation="im", num_tokens=3, finish_reason=FinishReason.LENGTH, prompt=TIMES
    ),
)
STOPPED = ev.CancelRequested(at_ns=3, reason="a stop string was met", num_tokens=2, finish_reason=FinishReason.STOP)
SETTLED = ev.ReleaseSettled(at_ns=5, role=WorkerRole.MIXED, acknowledged=True, rpc_ms=1.0, prompt=TIMES)


def running() -> Handoff:
    """A request that runs on a mixed worker."""
    submit = SubmitRequest(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        route=MixedRoute(mixed=MIXED),
        num_prompt_tokens=40,
        prompt_hash="h",
        sampling=SamplingParams(max_tokens=8, seed=1),
        timeout_ms=10_000,
    )
    asked = ev.Submitted(at_ns=0, submit=submit, deadline_ns=10_000, deadline_at="2030-01-01T00:00:10+00:00")
    handoff, _ = begin(asked, Policy())
    handoff, _ = step(handoff, ev.RecordStored(at_ns=1, write=1, revision=1))
    handoff, _ = step(handoff, ev.RunAccepted(at_ns=2, rpc_ms=1.0))
    handoff, _ = step(handoff, ev.RecordStored(at_ns=2, write=2, revision=2))
    return handoff


def measured(*happened: ev.Event) -> list[PromptTimes]:
    """What is counted while these things happen, with every write of the record stored at once."""
    handoff, counted = running(), list[PromptTimes]()
    queue = list(happened)
    while queue:
        handoff, effects = step(handoff, queue.pop(0))
        counted += [effect.prompt for effect in effects if isinstance(effect, fx.Measured)]
        writes = [effect.write for effect in effects if isinstance(effect, fx.StoreRecord)]
        queue[:0] = [ev.RecordStored(at_ns=3, write=write, revision=write + 1) for write in writes]
    return counted


def test_the_end_counts_once_though_it_comes_twice() -> None:
    """A report without an answer is repeated."""
    handoff = running()
    handoff, first = step(handoff, ENDED)
    _, again = step(handoff, ENDED)
    assert [sum(isinstance(effect, fx.Measured) for effect in effects) for effects in (first, again)] == [1, 0]
    assert measured(ENDED, ENDED) == [TIMES]


def test_the_release_counts_when_no_end_is_told() -> None:
    """The router saw a stop string."""
    assert measured(STOPPED, SETTLED) == [TIMES]
    assert measured(STOPPED, SETTLED, SETTLED) == [TIMES]


def test_an_end_and_a_release_that_cross_count_once() -> None:
    """In either order."""
    assert measured(STOPPED, ENDED, SETTLED) == [TIMES]
    assert measured(STOPPED, SETTLED, ENDED) == [TIMES]
