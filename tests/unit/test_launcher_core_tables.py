"""What `pdmesh show`, `pdmesh events` and `pdmesh handoff` print, letter by letter."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName, HandoffEvent
from contracts.handoff import Grant, HandoffRecord, HandoffState, SourceProgress
from contracts.manifest import Namespace, Role
from contracts.phases import Phase
from contracts.pull import RequestLock, ShardPull, ShardState, Transfer
from contracts.requests import DisaggregatedRoute, MixedRoute, SamplingParams, WorkerRef
from contracts.show import HandoffView, PartView
from services.launcher.core.handoff_view import render_handoff
from services.launcher.core.table import render, render_event
from services.launcher.core.timeline import Row, Timeline

TROUBLE = ErrorInfo(code=ErrorCode.WORKER_LOST, message="d0 is gone")
PREFILL = WorkerRef(worker_id="p0", incarnation="ip")
DECODE = WorkerRef(worker_id="d0", incarnation="id")
TIMELINE = Timeline(
    handoff_id="r1-0",
    request_id="r1",
    trace_id="abc",
    route="p0 -> d0",
    outcome="failed (worker_lost)",
    rows=(
        Row(at_ms=0.0, name="request submitted", who="broker-0", detail="40 prompt tokens"),
        Row(at_ms=12.25, name="push", who="p0", duration_ms=1000.5, num_bytes=1234567, num_parts=1000, detail="busy"),
        Row(at_ms=2000.0, name="request failed", who="broker-0"),
    ),
    num_bytes=1234567,
    num_parts=1000,
    overlap=0.666,
    gap_ms=3.25,
    total_ms=2000.0,
    phases=(
        (Phase.RESERVE_RPC, None, 1.5),
        (Phase.PUSH, 0, 1234.5),
        (Phase.TAKEOVER_TOTAL, None, 2.0),
    ),
    missing_parts=("this part", "that part"),
    num_missing_parts=5,
)
BARE = replace(
    TIMELINE,
    trace_id="",
    rows=(),
    overlap=None,
    gap_ms=None,
    phases=((Phase.TOTAL, None, 2000.0),),
    missing_parts=("this part", "that part"),
    num_missing_parts=2,
)
FULL = HandoffEvent(
    event=EventName.PART_PUSHED,
    service="prefill",
    instance="p0",
    handoff_id="r1-0",
    request_id="r1",
    at="2030-01-01T00:00:00Z",
    at_ns=1,
    duration_ms=1.25,
    prepare_ms=2.0,
    rpc_ms=3.0,
    enqueue_ms=4.0,
    total_ms=5.0,
    num_bytes=6000,
    num_parts=7000,
    num_tokens=8000,
    num_steps=1900,
    num_drafted=5500,
    num_accepted=2800,
    accepted_at=(1400, 900, 500),
    layer=9,
    namespace="draft",
    role="key",
    source_rank=0,
    destination_rank=11,
    source_dp_rank=12,
    destination_dp_rank=13,
    finish_reason="stop",
    quarantined=True,
    error=TROUBLE,
)
RECORD = HandoffRecord(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    router_incarnation="ir",
    route=DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
    state=HandoffState.PREFILLING,
    fence=4,
    num_prompt_tokens=4000,
    num_delivered_tokens=3,
    num_cached_tokens=1600,
    prompt_hash="h",
    sampling=SamplingParams(max_tokens=8, seed=1),
    deadline_at="2030-01-01T00:00:10+00:00",
    grant=Grant(
        worker_id="d0", incarnation="id", generation=3, block_ids=(0, 1, 2, 5, 7, 8, 10, 12), slot=1, dp_rank=2
    ),
    source=Grant(worker_id="p0", incarnation="ip", generation=9, block_ids=(4,), slot=2, staging_row=6),
    pulled=(Role.CONV, Role.SSM),
    lock=RequestLock(number=1, holder=DECODE, taken_at="2030-01-01T00:00:01+00:00"),
    progress=(
        SourceProgress(transfer=Transfer.PUSH, source_rank=0, num_parts=2000, num_done=1, num_bytes=12345),
        SourceProgress(transfer=Transfer.PULL, source_rank=1, num_parts=3, num_done=0, num_bytes=0),
    ),
    shards=(
        ShardPull(source_rank=0, destination_rank=1, state=ShardState.DONE, num_bytes=64000, duration_ms=2.125),
        ShardPull(source_rank=1, destination_rank=0, state=ShardState.FAILED, reason="no route"),
        ShardPull(source_rank=1, destination_rank=1, state=ShardState.WAITING),
    ),
)
KEY = PartView(
    namespace=Namespace.TARGET,
    role=Role.KEY,
    layer=3,
    source_rank=0,
    destination_rank=1,
    transfer=Transfer.PUSH,
    owed=((0, 8), (16, 24), (32, 40), (48, 56), (64, 72)),
    done=((0, 8), (16, 20)),
)
STATE = replace(KEY, role=Role.SSM, layer=0, transfer=Transfer.PULL, owed=((0, 1),), done=())
VIEW = HandoffView(
    record=RECORD,
    parts=(KEY, STATE),
    num_parts=2003,
    told=("prefill", "decode"),
    settled=(),
)
IN_QUARANTINE = "given back, but a writer could still touch it then; the worker's log tells its end (quarantine_ended)"
UNHEARD = (
    "no answer to the release; what it holds comes back with its process, when it is met again, or at the deadline"
)
MIXED_VIEW = HandoffView(
    record=replace(
        RECORD,
        route=MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im")),
        state=HandoffState.FAILED,
        error=TROUBLE,
        router_incarnation=None,
        num_delivered_tokens=0,
        num_cached_tokens=0,
        grant=Grant(worker_id="m0", incarnation="im", generation=1, block_ids=(), slot=0),
        source=None,
        lock=None,
        progress=(),
        shards=(),
    ),
    parts=(replace(STATE, done=((0, 1),)),),
    num_parts=1,
    told=("mixed",),
    settled=("mixed",),
)


def test_a_timeline_is_a_table_with_its_figures_below() -> None:
    """Numbers to the right, words to the left, no blank at the end of a line; what is missing is named as far as it is known."""
    assert render(TIMELINE).splitlines() == [
        "handoff r1-0: p0 -> d0, failed (worker_lost)",
        "  trace abc",
        "  began at ms      ms      bytes  parts  phase              where",
        "          0.0                            request submitted  broker-0  40 prompt tokens",
        "         12.2  1000.5  1,234,567  1,000  push               p0        busy",
        "       2000.0                            request failed     broker-0",
        "  moved       1,234,567 bytes in 1,000 parts",
        "  overlap     67% of the push time lay before prefill's compute ended",
        "  handoff gap 3.2 ms from the last cache byte to the first decode step",
        "  total       2000.0 ms",
        "  phases in ms",
        "    reserve_rpc                                       1.50",
        "    push (busy), rank 0                           1,234.50",
        "    takeover_total (commit to first decode step)      2.00",
        "  5 parts of the cache had not arrived:",
        "    this part",
        "    that part",
        "    and 3 more",
    ]


def test_a_timeline_shows_nothing_that_is_not_known() -> None:
    """Neither a trace nor an overlap nor a gap; the total is shown once; whoever is named in full is not followed by more."""
    assert render(BARE).splitlines() == [
        "handoff r1-0: p0 -> d0, failed (worker_lost)",
        "  began at ms  ms  bytes  parts  phase  where",
        "  moved       1,234,567 bytes in 1,000 parts",
        "  phases in ms",
        "    total (submit to end)  2,000.00",
        "  2 parts of the cache had not arrived:",
        "    this part",
        "    that part",
    ]
    assert "  total       2000.0 ms" in render(replace(BARE, phases=())).splitlines()
    nothing = render(replace(BARE, phases=(), total_ms=None, num_missing_parts=0)).splitlines()
    assert nothing == [*render(BARE).splitlines()[:3]]


def test_an_event_is_a_line_with_every_field_that_it_has() -> None:
    """In a fixed order, each with its name; replicas only where they are not the first."""
    words = (
        "2030-01-01T00:00:00Z  r1-0  part_pushed  p0",
        "busy_ms=1.2  prepare_ms=2.0  rpc_ms=3.0  enqueue_ms=4.0  total_ms=5.0",
        "bytes=6,000  parts=7,000  all_tokens=8,000",
        "steps=1,900  drafted=5,500  accepted=2,800  accepted_at=1400,900,500  layer=9  namespace=draft  role=key",
        "source_rank=0  destination_rank=11  source_dp_rank=12  destination_dp_rank=13",
        "finish_reason=stop  quarantined=1  error=worker_lost: d0 is gone",
    )
    assert render_event(FULL) == "  ".join(words)
    nothing = HandoffEvent(
        event=EventName.TAKEN_OVER, service="broker", instance="", handoff_id="h", request_id="r", at="now", at_ns=0
    )
    assert render_event(nothing) == "now  h  taken_over  broker"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (EventName.LAYER_COMPUTED, "compute_ms"),
        (EventName.RANK_PUSHED, "busy_ms"),
        (EventName.PREFILL_FINISHED, "compute_ms"),
        (EventName.LEDGER_CLOSED, "ledger_ms"),
        (EventName.SHARD_PULLED, "duration_ms"),
    ],
)
def test_a_duration_is_named_by_what_took_it(name: EventName, field: str) -> None:
    """A number means one thing."""
    event = HandoffEvent(
        event=name, service="x", instance="x", handoff_id="h", request_id="r", at="now", at_ns=0, duration_ms=1.0
    )
    assert render_event(event) == f"now  h  {name}  x  {field}=1.0"


def test_a_handoff_is_shown_by_who_owns_what() -> None:
    """Route, request, both grants, lock, memory, progress and shards; then every part that has not arrived in full."""
    assert render_handoff(VIEW).splitlines() == [
        "handoff r1-0: prefilling",
        "  route      p0 (ip) -> d0 (id)",
        "  prompt     4,000 tokens, 3 of them delivered before, 1,600 cached at decode",
        "  router     router-0 (ir)",
        "  deadline   2030-01-01T00:00:10+00:00; fence 4",
        "  grant      d0 replica 2: generation 3, 8 blocks (0-2, 5, 7-8, 10 and more), slot 1",
        "  source     p0: generation 9, 1 blocks (4), slot 2, staging row 6",
        "  pulls      conv, ssm",
        "  lock       1, held by d0 (id) since 2030-01-01T00:00:01+00:00",
        "  memory     may be held by: decode, prefill",
        "  push       source rank 0: 1 of 2000 parts, 12,345 bytes",
        "  pull       source rank 1: 0 of 3 parts, 0 bytes",
        "  shard      source rank 0 -> destination rank 1: done, 64,000 bytes in 2.12 ms",
        "  shard      source rank 1 -> destination rank 0: failed: no route",
        "  shard      source rank 1 -> destination rank 1: waiting",
        "  2 of 2003 parts have not arrived in full:",
        (
            "    target key of layer 3, source rank 0 -> destination rank 1 (push): "
            "[0, 8), [16, 20) of [0, 8), [16, 24), [32, 40), [48, 56) and more"
        ),
        "    target ssm of layer 0, source rank 0 -> destination rank 1 (pull): nothing of [0, 1)",
        "    and perhaps more: the message had no room for all",
    ]


def test_a_handoff_that_failed_on_a_mixed_worker_shows_why() -> None:
    """And nothing of what it never had."""
    assert render_handoff(MIXED_VIEW).splitlines() == [
        "handoff r1-0: failed: worker_lost: d0 is gone",
        "  route      m0 (im)",
        "  prompt     4,000 tokens, 0 cached at decode",
        "  router     router-0",
        "  deadline   2030-01-01T00:00:10+00:00; fence 4",
        "  grant      m0: generation 1, no blocks, slot 0",
        "  pulls      conv, ssm",
        "  lock       free",
        "  memory     given back everywhere",
    ]


def changed(**changes: Any) -> str:
    """The view with another record."""
    return render_handoff(replace(VIEW, record=replace(RECORD, **changes)))


def test_lines_that_would_say_nothing_are_left_out() -> None:
    """No lock where nothing is pulled, no grant before there is one, no memory of which nobody was told."""
    text = changed(pulled=(), lock=None, grant=None, source=None)
    assert not {"pulls", "lock", "grant", "source"} & {line.split()[0] for line in text.splitlines()[1:10]}
    assert "  memory " not in render_handoff(replace(VIEW, told=()))
    assert "may be held by: prefill" in render_handoff(replace(VIEW, settled=("decode",)))


@pytest.mark.parametrize(
    ("settled", "quarantined", "unheard", "lines"),
    [
        (("decode", "prefill"), (), (), ["memory     given back everywhere"]),
        (("decode",), (), (), ["memory     may be held by: prefill"]),
        (("prefill",), ("prefill",), (), ["memory     may be held by: decode", f"quarantine prefill: {IN_QUARANTINE}"]),
        (("prefill",), (), ("decode",), ["memory     given back by: prefill", f"unheard    decode: {UNHEARD}"]),
        (
            ("decode",),
            ("decode",),
            ("prefill",),
            [f"quarantine decode: {IN_QUARANTINE}", f"unheard    prefill: {UNHEARD}"],
        ),
        ((), (), ("prefill", "decode"), [f"unheard    decode, prefill: {UNHEARD}"]),
    ],
)
def test_what_has_not_come_back_is_not_said_to_be_given_back(
    settled: tuple[str, ...], quarantined: tuple[str, ...], unheard: tuple[str, ...], lines: list[str]
) -> None:
    """Memory in quarantine, and that of a worker which did not answer, have lines of their own."""
    text = render_handoff(replace(VIEW, settled=settled, quarantined=quarantined, unheard=unheard))
    kinds = ("memory", "quarantine", "unheard")
    assert [line.strip() for line in text.splitlines() if line.split()[0] in kinds] == lines


def test_lists_of_four_are_shown_whole() -> None:
    """More are cut, and the text says so."""
    grant = replace(RECORD.grant, block_ids=(0, 2, 4, 6)) if RECORD.grant else None
    assert "4 blocks (0, 2, 4, 6), slot 1" in changed(grant=grant)
    four = replace(KEY, owed=KEY.owed[:4])
    assert render_handoff(replace(VIEW, parts=(four,), num_parts=1)).endswith(
        "[0, 8), [16, 20) of [0, 8), [16, 24), [32, 40), [48, 56)"
    )


def test_nothing_more_is_suspected_behind_a_part_that_is_complete() -> None:
    """Those that are missing come first in a view."""
    complete = replace(STATE, done=STATE.owed)
    text = render_handoff(replace(VIEW, parts=(KEY, complete), num_parts=9))
    assert "  1 of 9 parts have not arrived in full:" in text.splitlines()
    assert "perhaps" not in text
    assert "perhaps" not in render_handoff(replace(VIEW, num_parts=2))
