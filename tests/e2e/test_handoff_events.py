"""What a plain NATS subscriber, who knows nothing of the project, can tell of a request; and that pushes overlap compute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import SLOW_LAYER, SLOW_MS
from tests.e2e.mesh_probe import Event, Probe

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [100 + number % 1000 for number in range(700)]


async def _finished(probe: Probe, max_tokens: int = 8, **parameters: Any) -> list[Event]:
    """The events of a fresh request, after its last one."""
    choice = await probe.complete(PROMPT, max_tokens, ignore_eos=True, **parameters)
    request_id = str(choice["id"]).partition("-")[2]

    def of_this(event: Event) -> bool:
        return bool(event["request_id"] == request_id)

    for last in ("request_finished", "prefill_released"):
        await probe.event(lambda event, last=last: of_this(event) and event["event"] == last)  # type: ignore[misc]  # bound early
    closed = _one(probe.of_request(request_id), "ledger_closed")

    def tells_all(_: Event) -> bool:
        names = [event["event"] for event in probe.of_request(request_id)]
        return names.count("part_pushed") == closed["num_parts"] and "layer_computed" in names

    await probe.event(tells_all)
    return sorted(probe.of_request(request_id), key=lambda event: event["at_ns"])


def _timeline(events: list[Event]) -> str:
    """One line an event, from the JSON alone."""
    start = events[0]["at_ns"]
    skipped = {"v", "type", "event", "service", "handoff_id", "request_id", "at", "at_ns", "phase"}
    lines = []
    for event in events:
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key not in skipped)
        lines.append(f"{(event['at_ns'] - start) / 1e6:9.2f} ms  {event['service']:8} {event['event']:18} {rest}")
    return "\n".join(lines)


def _one(events: list[Event], name: str) -> Event:
    (found,) = [event for event in events if event["event"] == name]
    return found


async def test_a_timeline_can_be_told_from_the_stream_alone(pair: Probe) -> None:
    """Every phase is there once, in order, with its duration; parts and bytes add up; nothing of the project is needed."""
    events = await _finished(pair)
    print(_timeline(events))
    order = [
        "request_submitted",
        "decode_reserved",
        "prefill_accepted",
        "prefill_started",
        "prefill_finished",
        "ledger_closed",
        "taken_over",
        "request_finished",
    ]
    at = [_one(events, name)["at_ns"] for name in order if name not in {"prefill_accepted", "ledger_closed"}]
    assert at == sorted(at)
    assert all(_one(events, name) for name in order)
    parts = [event for event in events if event["event"] == "part_pushed"]
    assert sum(part["num_bytes"] for part in parts) == _one(events, "ledger_closed")["num_bytes"]
    assert len(parts) == _one(events, "ledger_closed")["num_parts"]
    assert {part["source_rank"] for part in parts} == {0, 1}
    assert _one(events, "decode_reserved")["rpc_ms"] > 0
    assert _one(events, "taken_over")["total_ms"] >= 0


async def test_a_layer_is_there_before_the_last_layer_is_computed(pair: Probe) -> None:
    """Overlap is real: every part of layer 0 is done at decode before the last layer's compute of the last chunk starts."""
    events = await _finished(pair)
    last_layer = max(event["layer"] for event in events if event["event"] == "layer_computed")
    starts = [
        event["started_ns"] for event in events if event["event"] == "layer_computed" and event["layer"] == last_layer
    ]
    done = [event["at_ns"] for event in events if event["event"] == "part_pushed" and event["layer"] == 0]
    assert len(done) == 4
    assert max(done) < min(starts)


async def test_a_late_layer_moves_only_its_own_part(slow_pair: Probe) -> None:
    """One delayed layer on one rank: its part is late by the delay, every part that was queued before it is not."""
    events = await _finished(slow_pair)
    computed = _one(events, "prefill_finished")["at_ns"]
    parts = [event for event in events if event["event"] == "part_pushed"]

    def is_slow(part: Event) -> bool:
        return (part["layer"], part["role"], part["source_rank"]) == (SLOW_LAYER, "value", 0)

    (slow,) = [part for part in parts if is_slow(part)]
    others = [part for part in parts if not is_slow(part)]
    assert slow["at_ns"] - max(part["at_ns"] for part in others) > SLOW_MS * 1e6 / 2
    assert max(part["at_ns"] for part in others) < computed + SLOW_MS * 1e6 / 2
    assert _one(events, "ledger_closed")["at_ns"] > slow["at_ns"]
    assert _one(events, "taken_over")["at_ns"] > slow["at_ns"]
