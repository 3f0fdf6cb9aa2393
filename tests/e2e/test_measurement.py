"""One real request through real processes, looked at in every way that there is: they all tell the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from prometheus_client.parser import text_string_to_metric_families

from common.runtime.clock import Deadline, SystemClock
from common.runtime.trace import new_trace
from contracts.codec import decode
from contracts.events import HandoffEvent
from contracts.handoff import HandoffRecord
from contracts.phases import PULL_PHASES, Phase, phases_of
from contracts.trace import TraceContext, read_trace
from tests.e2e.mesh_probe import Event, Probe
from tests.e2e.proc import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES: Final = ("router", "broker", "prefill-0", "decode-0")
TABLE: Final = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
MAX_TOKENS: Final = 12
_POLL_S: Final = 0.05

Line = dict[str, Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Watched:
    """One request and all that was said of it: events, messages, log lines, and what the metrics gained."""

    def __init__(self, probe: Probe, trace: TraceContext) -> None:
        self.probe = probe
        self.trace = trace
        self.messages: list[Msg] = []
        self.answer: dict[str, Any] = {}
        self.answered_trace = ""
        self.gained: dict[str, Samples] = {}

    @property
    def request_id(self) -> str:
        """Our own id of the request."""
        return str(self.answer["id"]).partition("-")[2]

    @property
    def events(self) -> list[HandoffEvent]:
        """Its events so far."""
        told = self.probe.of_request(self.request_id)
        return [decode(json.dumps(event).encode(), HandoffEvent) for event in told]

    def lines(self, service: str) -> list[Line]:
        """What one service has logged of it."""
        return [line for line in _lines(self.probe, service) if self.request_id in json.dumps(line)]

    async def line(self, service: str, event: str) -> Line:
        """One line of one service, as soon as it is there."""
        (found,) = await _until(lambda: [line for line in self.lines(service) if line["event"] == event])
        return found

    def gain(self, service: str, name: str, **labels: str) -> float:
        """By how much one series has grown."""
        return self.gained[service].get((name, frozenset(labels.items())), 0.0)


async def _until(look: Callable[[], list[Line]]) -> list[Line]:
    """Look until there is something to see."""
    clock = SystemClock()
    deadline = Deadline.after(clock, DEADLINE_S)
    while not (found := look()) and not deadline.passed:
        await clock.sleep(_POLL_S)
    return found


def _lines(probe: Probe, service: str) -> list[Line]:
    whole, _, _ = (
        (probe.mesh.logs / f"{service}.log").read_text(encoding="utf-8").rpartition("\n")
    )  # the rest is being written
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


async def exposition(probe: Probe, service: str) -> str:
    """What /metrics of one service shows."""
    url = probe.url
    if service != "router":
        (line,) = [line for line in _lines(probe, service) if line["event"] == "admin_port_opened"]
        url = f"http://127.0.0.1:{line['port']}"
    async with probe.http.get(f"{url}/metrics") as response:
        assert response.status == 200
        return await response.text()


async def _samples(probe: Probe) -> dict[str, Samples]:
    found: dict[str, Samples] = {}
    for service in SERVICES:
        families = text_string_to_metric_families(await exposition(probe, service))
        found[service] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(pair: Probe) -> Watched:
    """One request of two chunks and more, alone in the mesh."""
    one = Watched(pair, new_trace())
    before = await _samples(pair)

    async def note(message: Msg) -> None:
        one.messages.append(message)

    tap = await pair.nats.subscribe(">", cb=note)
    await pair.nats.flush()
    body = {
        "model": await pair.model(),
        "prompt": [100 + number % 900 for number in range(600)],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with pair.http.post(f"{pair.url}/v1/completions", json=body, headers=one.trace.headers) as response:
        assert response.status == 200
        one.answer = await response.json()
        one.answered_trace = response.headers["traceparent"]
    await one.line("broker", "handoff_finished")
    await one.line("decode-0", "request_ended")
    closed = await pair.event(_event_of(one, "ledger_closed"))
    async with asyncio.timeout(DEADLINE_S):  # events of single parts come after the release
        while sum(event.event == "part_pushed" for event in one.events) < closed["num_parts"]:
            await SystemClock().sleep(_POLL_S)
    await tap.unsubscribe()
    after = await _samples(pair)
    one.gained = {
        service: {key: value - before[service].get(key, 0.0) for key, value in samples.items()}
        for service, samples in after.items()
    }
    return one


def _event_of(one: Watched, name: str) -> Callable[[Event], bool]:
    return lambda event: bool(event["request_id"] == one.request_id and event["event"] == name)


async def test_events_line_and_histograms_tell_the_same_phases(watched: Watched) -> None:
    """Every phase is there, once each way (a push once a source rank), and none outlasts the request."""
    told: dict[tuple[Phase, str], float] = {}
    for event in watched.events:
        if event.service == "broker":
            rank = "" if event.source_rank is None else str(event.source_rank)
            told |= {(phase, rank): value for phase, value in phases_of(event)}
    assert {phase for phase, _ in told} == set(Phase) - PULL_PHASES
    assert {rank for phase, rank in told if phase is Phase.PUSH} == {"0", "1"}
    line = await watched.line("broker", "handoff_finished")
    assert line["phases_ms"] == {
        f"push_rank_{rank}" if phase is Phase.PUSH else phase.value: value for (phase, rank), value in told.items()
    }
    for (phase, rank), value in told.items():
        labels = {"phase": phase.value, "source_rank": rank}
        assert watched.gain("broker", "pdmesh_handoff_phase_seconds_count", **labels) == 1, phase
        gained = watched.gain("broker", "pdmesh_handoff_phase_seconds_sum", **labels)
        assert gained == pytest.approx(value / 1e3, abs=1e-9), phase
    total = told[Phase.TOTAL, ""]
    assert all(value <= total for (phase, _), value in told.items() if phase is not Phase.RELEASE_RPC)
    assert told[Phase.RESERVE_PREPARE, ""] <= told[Phase.RESERVE_RPC, ""]
    assert told[Phase.PREFILL_QUEUE, ""] + told[Phase.PREFILL_COMPUTE, ""] <= total
    assert told[Phase.TAKEOVER_PREPARE, ""] + told[Phase.TAKEOVER_ENQUEUE, ""] == pytest.approx(
        told[Phase.TAKEOVER_TOTAL, ""]
    )


async def test_bytes_parts_and_tokens_agree_wherever_they_are_counted(watched: Watched) -> None:
    """Single parts, ranks, the ledger, prefill's and the broker's counters, both terminal lines, the client's usage."""
    (closed,) = [event for event in watched.events if event.event == "ledger_closed"]
    parts = [event for event in watched.events if event.event == "part_pushed"]
    line = await watched.line("broker", "handoff_finished")
    assert closed.num_bytes == sum(part.num_bytes or 0 for part in parts) == line["bytes"]
    assert closed.num_parts == len(parts) == line["num_parts"]
    assert watched.gain("broker", "pdmesh_broker_pushed_bytes_total") == closed.num_bytes
    pushed = [
        value for (name, _), value in watched.gained["prefill-0"].items() if name == "pdmesh_worker_pushed_bytes_total"
    ]
    assert sum(pushed) == closed.num_bytes
    usage = watched.answer["usage"]
    router = await watched.line("router", "request_finished")
    assert line["num_tokens"] == router["num_completion_tokens"] == usage["completion_tokens"] == MAX_TOKENS
    assert line["num_prompt_tokens"] == router["num_prompt_tokens"] == usage["prompt_tokens"] == 600
    assert watched.gain("prefill-0", "pdmesh_worker_prefilled_tokens_total") == 600
    assert watched.gain("decode-0", "pdmesh_worker_decoded_tokens_total") == MAX_TOKENS - 1
    key = {"endpoint": "completions"}
    assert watched.gain("router", "pdmesh_router_choice_output_tokens_sum", **key) == MAX_TOKENS
    first = watched.gain("router", "pdmesh_router_time_to_first_token_seconds_sum", **key)
    assert first == pytest.approx(router["ttft_ms"] / 1e3, abs=1e-6)
    whole = watched.gain("router", "pdmesh_router_request_seconds_sum", **key)
    assert whole == pytest.approx(router["duration_ms"] / 1e3, abs=1e-6)
    assert first <= whole  # the broker may hear of the end after the client has: its own duration proves nothing here


async def test_every_chunk_is_in_the_layers_times(watched: Watched) -> None:
    """600 tokens in chunks of 256: three steps, all of them in the busy time, which is part of the compute."""
    layers = [event for event in watched.events if event.event == "layer_computed"]
    assert {event.num_chunks for event in layers} == {3}
    (finished,) = [event for event in watched.events if event.event == "prefill_finished"]
    for rank in (0, 1):
        busy = sum(event.duration_ms or 0.0 for event in layers if event.source_rank == rank)
        assert 0 < busy <= (finished.duration_ms or 0.0) + 1.0


async def test_one_trace_id_is_in_every_event_every_line_and_every_message(watched: Watched) -> None:
    """What mentions the request names its trace: nobody makes up another, and each process is a hop of its own."""
    trace_id = watched.trace.trace_id
    router = read_trace({"traceparent": watched.answered_trace})
    assert router is not None
    assert router.trace_id == trace_id
    assert {event.trace_id for event in watched.events} == {trace_id}
    assert {event.service for event in watched.events} == {"broker", "prefill"}
    spans = {router.span_id, watched.trace.span_id}
    for service in SERVICES:
        lines = watched.lines(service)
        assert lines, service
        assert {line.get("trace_id") for line in lines} == {trace_id}, service
        own = {line["span_id"] for line in lines}
        assert service == "router" or not own & spans, service
        spans |= own
    of_request = [each for each in watched.messages if watched.request_id in f"{each.subject} {each.data!r}"]
    kinds = {each.subject.split(".")[2] for each in of_request if each.subject.startswith("pd.v1.")}
    assert kinds == {"rpc", "ho", "tok", "ev"}
    for message in of_request:
        if message.subject.startswith("$KV."):
            headers = {"traceparent": decode(message.data, HandoffRecord).traceparent}
        else:
            headers = dict(message.headers or {})
        found = read_trace(headers)
        assert found is not None, (message.subject, message.data[:200])
        assert found.trace_id == trace_id, message.subject


async def test_a_stop_string_finishes_its_handoff(pair: Probe) -> None:
    """The text ends before the stop string; the handoff is finished, for that reason, with the tokens that were counted."""
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    whole = await pair.complete("In the beginning", **asked)
    stop = str(whole["text"])[40:52]
    choice = await pair.complete("In the beginning", **asked, stop=[stop])
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == str(whole["text"]).partition(stop)[0]
    request_id = str(choice["id"]).partition("-")[2]
    end = await pair.event(
        lambda each: (
            each["request_id"] == request_id
            and each["event"].startswith("request_")
            and each["event"] != "request_submitted"
        )
    )
    assert (end["event"], end["finish_reason"]) == ("request_finished", "stop")
    assert end["num_tokens"] == choice["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_what_is_scraped_is_what_is_documented(pair: Probe) -> None:
    """The processes show the table's metrics, all of them and no others, with its types; all of it can be read."""
    rows = [line.split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for service in SERVICES:
        role = service.partition("-")[0]
        documented = {(row[0].strip("| `"), row[1]) for row in rows if row[3] == "all" or role in row[3].split(", ")}
        shown: set[tuple[str, str]] = set()
        for line in (await exposition(pair, service)).splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                shown.add((name, kind))
        assert {(name, kind) for name, kind in shown if not name.startswith("process_")} == documented, service
