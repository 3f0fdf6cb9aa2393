"""What a prompt took at a mixed worker: measured there, and told to the broker when the worker gives the request up."""

from common.bus.storage import EVENTS_CONFIG
from common.worker.service import WorkerService
from contracts import subjects
from contracts.codec import decode, encode
from contracts.events import EventName, HandoffEvent
from contracts.handoff import Released, RequestEnded
from contracts.phases import phases_of, phases_of_prompt
from contracts.requests import Accepted, CancelWork, SamplingParams
from contracts.subjects import WorkerVerb
from services.mixed.service import MixedService
from tests.integration.worker_world import HANDOFF, REQUEST, Mesh, in_mesh, mixed_run


async def run(mesh: Mesh, max_tokens: int) -> WorkerService:
    """A mixed worker that has been asked to serve the usual prompt."""
    worker = await mesh.add(MixedService, "mixed-0")
    await mesh.send_prompt("mixed", "mixed-0")
    message = mixed_run(sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0))
    assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=HANDOFF)
    return worker


def test_a_mixed_worker_tells_what_the_prompt_took_with_the_end() -> None:
    """The figures are those of its event."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        worker = await run(mesh, max_tokens=3)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.prompt is not None
        assert ended.prompt.compute_ms > 0
        assert await worker.bus.flush_events()
        stream = mesh.bus.read_stream(subjects.EVENTS_STREAM, subjects.EVENTS_FILTER)
        events = [decode(stored.data, HandoffEvent) async for stored in stream]
        told = [list(phases_of(event)) for event in events if event.event is EventName.PREFILL_FINISHED]
        assert told == [list(phases_of_prompt(ended.prompt))]
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_mixed_worker_that_is_cut_off_tells_it_with_the_release() -> None:
    """A stop string ends a request from outside, so that no end is reported; before the first token there is nothing to tell."""

    async def scenario(mesh: Mesh) -> None:
        worker = await run(mesh, max_tokens=5000)
        await mesh.frames.get()
        await mesh.bus.publish(subjects.cancel("mixed-0", REQUEST), encode(CancelWork(handoff_id=HANDOFF)))
        sequence = worker.table.get(HANDOFF)
        assert sequence is not None
        released = await mesh.release("mixed", "mixed-0")
        assert isinstance(released, Released)
        assert released.prompt == sequence.prompt_times
        assert released.prompt is not None
        assert await mesh.release("mixed", "mixed-0") == Released(handoff_id=HANDOFF)
        assert mesh.heard.empty()

    in_mesh(scenario)
