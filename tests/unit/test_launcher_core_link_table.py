"""What `pdmesh links` prints of pairs, letter by letter, and what is told of an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.links import LinkRecord, LinkState
from contracts.requests import WorkerRef
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.launcher.core.byte_size import shown_size
from services.launcher.core.links import render_links
from services.launcher.core.log_line import last_word, readable


def worker(worker_id: str, *, state: WorkerState = WorkerState.READY) -> WorkerRecord:
    """A worker; its role is the beginning of its id."""
    return WorkerRecord(
        worker_id=worker_id,
        incarnation="i",
        role=WorkerRole(worker_id.partition("-")[0]),
        state=state,
        model="tiny",
        model_fingerprint="f",
        tp=1,
        dp=1,
        dcp=1,
        block_size=16,
        num_blocks=64,
        num_slots=8,
        max_sequence_tokens=1024,
        load=WorkerLoad(num_free_blocks=64, num_free_slots=8, num_waiting=0, num_running=0),
    )


def link(prefill: str, decode: str, since: str = "2030-01-01T10:20:30.125+00:00", **says: Any) -> LinkRecord:
    """A record of the usual starts."""
    values: dict[str, Any] = {"state": LinkState.LINKED}
    return LinkRecord(
        prefill=WorkerRef(worker_id=prefill, incarnation="i"),
        decode=WorkerRef(worker_id=decode, incarnation="i"),
        since=since,
        **(values | says),
    )


def test_links_are_a_table_with_reasons_between_its_lines() -> None:
    """Words to the left, numbers to the right; whole seconds with their zone; every reason that there is."""
    workers = [
        worker("prefill-0", state=WorkerState.DRAINING),
        worker("decode-0"),
        worker("decode-1", state=WorkerState.DRAINING),
        worker("decode-2"),
    ]
    links = [
        link(
            "prefill-0",
            "decode-0",
            topology="tp2 -> tp1",
            transport="shm",
            num_parts=1234,
            token_bytes=5678,
            why_no_drafts="none at the decode worker",
        ),
        link("prefill-0", "decode-2", "2030-01-01T10:20:30+02:00", state=LinkState.MEETING, reason="no answer"),
        link(
            "prefill-8", "decode-9", state=LinkState.REFUSED, num_failures=3, reason="dtypes differ", state_bytes=9012
        ),
    ]
    assert render_links(links, workers).splitlines() == [
        "prefill    decode    state    since                      topology    transport  drafts  parts  bytes/token  state bytes",
        "prefill-0  decode-0  linked   2030-01-01T10:20:30Z       tp2 -> tp1  shm        no      1,234        5,678",
        "    no drafts come along: none at the decode worker",
        "prefill-0  decode-1  none",
        "    prefill-0 and decode-1 drains",
        "prefill-0  decode-2  meeting  2030-01-01T10:20:30+02:00",
        "    no answer",
        "prefill-8  decode-9  refused  2030-01-01T10:20:30Z                                                                9,012",
        "    prefill-8 is gone; decode-9 is gone; dtypes differ",
    ]


def test_failures_are_counted_only_of_a_pair_that_still_meets() -> None:
    """A refusal is not a try that failed."""
    workers = [worker("prefill-0"), worker("decode-0")]
    refused = link("prefill-0", "decode-0", state=LinkState.REFUSED, num_failures=3, reason="dtypes differ")
    assert render_links([refused], workers).splitlines()[-1] == "    dtypes differ"


def test_a_table_without_pairs_is_its_head() -> None:
    """Nobody to link."""
    assert render_links([], [worker("decode-0")]).split() == [
        *("prefill", "decode", "state", "since", "topology", "transport"),
        *("drafts", "parts", "bytes/token", "state", "bytes"),
    ]


def test_an_exception_is_told_by_its_innermost_place() -> None:
    """The last of its frames, however many there are; one without frames is not told of."""
    frames = [{"filename": f"{name}.py", "lineno": n, "name": name} for n, name in enumerate(("outer", "mid", "inner"))]
    line = {"time": "t", "level": "error", "event": "failed", "x": 1}
    line["exception"] = [{"exc_type": "KeyError", "frames": frames}, {"exc_type": "E", "frames": []}]
    assert readable(json.dumps(line)) == "t error failed x=1 (KeyError at inner.py:2 in inner)"


@pytest.mark.parametrize("missing", ["time", "level", "event"])
def test_a_line_without_its_usual_fields_stays_as_it_is(missing: str) -> None:
    """It is not one of ours."""
    line = json.dumps({key: "x" for key in ("time", "level", "event") if key != missing})
    assert readable(line) == line


def test_lines_are_cut_behind_400_characters() -> None:
    """One that has just so many is shown whole."""
    assert readable("x" * 400) == "x" * 400
    assert readable("x" * 401) == "x" * 400 + "..."


def test_progress_without_a_count_begins_at_nothing() -> None:
    """What has no total has no progress."""
    assert last_word(('{"event": "engine_loading", "total": 8}',)) == "engine loading 0/8"
    assert last_word(('{"event": "engine_loading", "done": 8}',)) == "engine loading"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(2048, "2.0 KiB"), (1024**2 - 1, "1,024.0 KiB"), (1024**2, "1.0 MiB"), (2 * 1024**6, "2,048.0 PiB")],
)
def test_sizes_stay_in_the_largest_unit_that_there_is(num_bytes: int, text: str) -> None:
    """And below the next one until they reach it."""
    assert shown_size(num_bytes) == text
