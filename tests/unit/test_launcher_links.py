"""What `pdmesh links` and `pdmesh events` tell of links."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from msgspec.structs import replace

from common.bus.memory import MemoryBus, MemoryServer
from common.bus.storage import EVENTS_CONFIG, LINKS_CONFIG, WORKERS_CONFIG
from common.runtime.clock import SystemClock
from contracts import subjects
from contracts.codec import encode
from contracts.links import LinkEvent, LinkEventName, LinkRecord, LinkState
from contracts.requests import WorkerRef
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.launcher.arguments import parse
from services.launcher.console import Console
from services.launcher.core.links import render_links
from services.launcher.show import follow_events, show_links, show_timeline
from services.launcher.stream import read_all

SINCE = "2030-01-01T10:20:30.123456+00:00"


def worker(worker_id: str, **changes: Any) -> WorkerRecord:
    """A worker; its role is the beginning of its id."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"i{worker_id}",
        "role": WorkerRole(worker_id.partition("-")[0]),
        "state": WorkerState.READY,
        "model": "tiny",
        "model_fingerprint": "f",
        "tp": 1,
        "dp": 1,
        "dcp": 1,
        "block_size": 16,
        "num_blocks": 64,
        "num_slots": 8,
        "max_sequence_tokens": 1024,
        "load": WorkerLoad(num_free_blocks=64, num_free_slots=8, num_waiting=0, num_running=0),
    }
    return WorkerRecord(**(values | changes))


def link(prefill: str, decode: str, state: LinkState = LinkState.LINKED, **changes: Any) -> LinkRecord:
    """A record of the usual starts of two workers."""
    values: dict[str, Any] = {
        "prefill": WorkerRef(worker_id=prefill, incarnation=f"i{prefill}"),
        "decode": WorkerRef(worker_id=decode, incarnation=f"i{decode}"),
        "state": state,
        "since": SINCE,
    }
    return LinkRecord(**(values | changes))


def event(name: LinkEventName, **changes: Any) -> LinkEvent:
    """An event of the usual pair."""
    ref = link("prefill-0", "decode-0")
    return LinkEvent(
        event=name,
        service="prefill",
        instance="prefill-0",
        prefill=ref.prefill,
        decode=ref.decode,
        at=SINCE,
        at_ns=1,
        **changes,
    )


def screen() -> tuple[Console, io.StringIO, io.StringIO]:
    """A console with what it shows and what it says."""
    out, progress = io.StringIO(), io.StringIO()
    return Console(SystemClock(), out=out, progress=progress), out, progress


async def bus_with(*records: WorkerRecord | LinkRecord) -> MemoryBus:
    """A bus that holds some records, and one that nobody can read."""
    bus = MemoryServer(SystemClock()).connect()
    workers, links = await bus.ensure_bucket(WORKERS_CONFIG), await bus.ensure_bucket(LINKS_CONFIG)
    await workers.put("strange", b"{}")
    for record in records:
        if isinstance(record, WorkerRecord):
            await workers.put(record.worker_id, encode(record))
        else:
            await links.put(subjects.link_key(record.prefill.worker_id, record.decode.worker_id), encode(record))
    return bus


def reasons(links: list[LinkRecord], workers: list[WorkerRecord]) -> dict[str, tuple[str, str]]:
    """State and reason of each pair, as the table shows them."""
    found: dict[str, tuple[str, str]] = {}
    pair = ""
    for line in render_links(links, workers).splitlines()[1:]:
        if line.startswith("    "):
            found[pair] = (found[pair][0], line.strip())
        else:
            prefill, decode, state = line.split()[:3]
            pair = f"{prefill} {decode}"
            found[pair] = (state, "")
    return found


def test_every_pair_has_a_line_and_a_reason_when_it_is_not_linked() -> None:
    """Also pairs without a record: a table that leaves out what is missing does not answer the question."""
    workers = [worker("prefill-0"), worker("mixed-0"), *(worker(f"decode-{number}") for number in range(5))]
    workers.append(worker("decode-5", state=WorkerState.DRAINING))
    links = [
        link("prefill-0", "decode-0", topology="tp2 -> tp1", transport="shm", num_parts=1234),
        link("prefill-0", "decode-1", LinkState.REFUSED, rule="same_dtypes", reason="dtypes: a and b"),
        link("prefill-0", "decode-2", LinkState.MEETING, num_failures=2, reason="no answer"),
        replace(link("prefill-0", "decode-3"), decode=WorkerRef(worker_id="decode-3", incarnation="before")),
        link("prefill-9", "decode-0"),
        link("prefill-9", "decode-1", num_parts=7, has_drafts=True),
        link("prefill-9", "decode-2", num_parts=7, why_no_drafts="draft: d1 here, none there"),
    ]
    unmet = "the prefill worker has not met this start of the decode worker"
    assert reasons(links, workers) == {
        "prefill-0 decode-0": ("linked", ""),
        "prefill-0 decode-1": ("refused", "dtypes: a and b"),
        "prefill-0 decode-2": ("meeting", "2 tries failed: no answer"),
        "prefill-0 decode-3": ("none", unmet),
        "prefill-0 decode-4": ("none", unmet),
        "prefill-0 decode-5": ("none", "decode-5 drains"),
        "prefill-9 decode-0": ("linked", "prefill-9 is gone"),
        "prefill-9 decode-1": ("linked", "prefill-9 is gone"),
        "prefill-9 decode-2": ("linked", "prefill-9 is gone; no drafts come along: draft: d1 here, none there"),
    }
    lines = render_links(links, workers).splitlines()
    head, first = lines[:2]
    drafts = {line.split()[1]: line.split()[4:] for line in lines if line.startswith("prefill-9")}
    assert (drafts["decode-1"], drafts["decode-2"]) == (["yes", "7"], ["no", "7"])
    assert head.split() == [
        *["prefill", "decode", "state", "since", "topology", "transport", "drafts", "parts", "bytes/token"],
        *["state", "bytes"],
    ]
    assert first.split() == [
        *["prefill-0", "decode-0", "linked", "2030-01-01T10:20:30Z", "tp2", "->", "tp1", "shm", "no", "1,234"],
    ]


async def test_the_command_reads_the_bus() -> None:
    """`pdmesh links`: the table on standard output, what cannot be read on standard error."""
    assert parse(["links", "--nats", "nats://x"]).command == "links"
    bus = await bus_with(worker("prefill-0"), worker("decode-0"), link("prefill-0", "decode-0"))
    console, out, progress = screen()
    assert await show_links(bus, console) == 0
    assert [line.split()[:3] for line in out.getvalue().splitlines()[1:]] == [["prefill-0", "decode-0", "linked"]]
    assert "1 messages that this build cannot read" in progress.getvalue()


async def test_without_a_pair_the_command_says_who_is_there() -> None:
    """Status 1, and the workers that have registered."""
    bus = await bus_with(worker("mixed-0"), worker("decode-0"))
    console, out, progress = screen()
    assert await show_links(bus, console) == 1
    assert out.getvalue() == ""
    assert "there is no pair of a prefill and a decode worker; workers that are registered: decode-0, mixed-0" in (
        progress.getvalue()
    )


async def test_events_of_links_are_shown_and_no_part_of_a_timeline() -> None:
    """`pdmesh events` tells of them between the others; a timeline is about a handoff."""
    bus = MemoryServer(SystemClock()).connect()
    await bus.ensure_stream(EVENTS_CONFIG)
    told = [
        event(LinkEventName.LINKED, topology="tp2 -> tp1", transport="shm", num_parts=40),
        event(LinkEventName.LINK_REFUSED, rule="same_model", reason="model: a and b"),
    ]
    for number, each in enumerate(told):
        subject = subjects.link_event("prefill", "prefill-0", "decode-0", each.event)
        assert bus.publish_event(subject, encode(each), message_id=str(number))
    await bus.flush_events()
    everything = await read_all(bus)
    assert (everything.all, everything.events, everything.num_unreadable) == (tuple(told), (), 0)
    console, out, progress = screen()
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        following = group.create_task(follow_events(bus, console, from_start=True), name="follow")
        while len(out.getvalue().splitlines()) < len(told):  # noqa: ASYNC110 - a screen cannot be waited for
            await asyncio.sleep(0)
        following.cancel()
    assert out.getvalue().splitlines() == [
        f"{SINCE}  prefill-0 -> decode-0  linked  prefill-0  topology=tp2 -> tp1  transport=shm  parts=40",
        f"{SINCE}  prefill-0 -> decode-0  link_refused  prefill-0  rule=same_model  reason=model: a and b",
    ]
    assert await show_timeline(bus, "prefill-0_to_decode-0", console) == 1
    assert "cannot read" not in progress.getvalue()
