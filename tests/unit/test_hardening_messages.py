"""Messages that nobody should send: whoever reads them refuses them with a CodecError, and nothing else."""

import json

import pytest

from contracts.codec import decode, encode
from contracts.errors import CodecError
from contracts.handoff import Grant, PartsReport, RunPrefill
from contracts.requests import Ping, PromptFrame, SamplingParams, TokenFrame
from contracts.workers import ScanWorker, WorkerRecord

RUN = RunPrefill(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    incarnation="i1",
    fence=1,
    num_prompt_tokens=3,
    prompt_hash="h",
    sampling=SamplingParams(max_tokens=4, seed=1),
    timeout_ms=1000,
    grant=Grant(worker_id="decode-0", incarnation="i2", generation=5, block_ids=(1,), slot=0),
    num_cached_tokens=0,
)


@pytest.mark.parametrize("kind", [PartsReport, TokenFrame, RunPrefill])
@pytest.mark.parametrize("data", [b'{"a":' * 20_000, b'{"x":' + b"[" * 20_000])
def test_deeply_nested_bytes_are_refused_like_any_other_garbage(kind: type[object], data: bytes) -> None:
    """A reader of a subscription catches CodecError alone: anything else would end its service."""
    with pytest.raises(CodecError, match="not a valid"):
        decode(data, kind)


@pytest.mark.parametrize("value", [-1, 1 << 63, 1 << 64, 10**30])
@pytest.mark.parametrize(
    "path",
    [
        ("attempt",),
        ("fence",),
        ("num_prompt_tokens",),
        ("timeout_ms",),
        ("num_cached_tokens",),
        ("sampling", "max_tokens"),
        ("sampling", "seed"),
        ("sampling", "top_k"),
        ("grant", "generation"),
        ("grant", "slot"),
        ("grant", "block_ids", 0),
    ],
)
def test_numbers_that_do_not_fit_into_what_comes_after_are_refused(path: tuple[str | int, ...], value: int) -> None:
    """Rank processes get 64 bits, and no count or id is negative; the error names the place of the number."""
    message = json.loads(encode(RUN))
    place = message
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CodecError, match=str(next(step for step in reversed(path) if isinstance(step, str)))):
        decode(json.dumps(message).encode(), RunPrefill)


def test_the_largest_numbers_that_fit_are_read() -> None:
    """The bound is where it has to be, and not below."""
    message = json.loads(encode(RUN))
    message["grant"]["generation"] = message["sampling"]["seed"] = (1 << 63) - 1
    assert decode(json.dumps(message).encode(), RunPrefill).grant.generation == (1 << 63) - 1


def test_a_prompt_frame_keeps_its_numbers_in_range() -> None:
    """The frames come straight from the bus into a buffer that counts by them."""
    frame = {
        "type": "prompt_frame",
        "handoff_id": "r1-0",
        "index": 0,
        "num_frames": 1,
        "prompt_hash": "h",
        "ids_b64": "",
    }
    with pytest.raises(CodecError, match="timeout_ms"):
        decode(json.dumps({**frame, "num_prompt_tokens": 1, "timeout_ms": 10**30}).encode(), PromptFrame)


@pytest.mark.parametrize("worker_id", ["", "a.b", "*", ">", "mixed 2", "x" * 64, "decode-0\n"])
def test_a_worker_record_whose_id_is_no_subject_token_is_refused(worker_id: str) -> None:
    """Whoever reads it would call the worker by that name; such a record must not become a route."""
    record = {
        "type": "worker_record",
        "worker_id": "decode-0",
        "incarnation": "i1",
        "role": "decode",
        "state": "ready",
        "model": "tiny",
        "model_fingerprint": "f",
        **dict.fromkeys(("tp", "dp", "dcp", "block_size", "num_blocks", "num_slots", "max_sequence_tokens"), 1),
        "load": dict.fromkeys(("num_free_blocks", "num_free_slots", "num_waiting", "num_running"), 0),
    }
    assert decode(json.dumps(record).encode(), WorkerRecord).worker_id == "decode-0"
    with pytest.raises(CodecError, match="worker_id"):
        decode(json.dumps(record | {"worker_id": worker_id}).encode(), WorkerRecord)


@pytest.mark.parametrize("data", [b"{}", b'{"v":1}', b'{"type":"(another message)"}'])
@pytest.mark.parametrize("kind", [Ping, ScanWorker])
def test_a_message_without_its_tag_is_none(kind: type[object], data: bytes) -> None:
    """Also where no field of it has to be there: an empty object is not every message at once."""
    with pytest.raises(CodecError) as caught:
        decode(data, kind)
    assert caught.value.param == "type"


def test_a_newer_schema_is_named_even_if_nothing_of_it_fits() -> None:
    """Fields of a later build may have other types: the version is what a reader needs to hear of."""
    with pytest.raises(CodecError, match="schema version 2; this build reads up to 1") as caught:
        decode(b'{"type":"ping_with_more","v":2,"broker_id":[]}', Ping)
    assert caught.value.param == "v"


@pytest.mark.parametrize("version", [b"0", b"-3", b"null", b"1.5", b"9" * 5000])
def test_a_version_that_is_none_is_refused(version: bytes) -> None:
    """Versions count from 1."""
    with pytest.raises(CodecError) as caught:
        decode(b'{"type":"ping","v":' + version + b"}", Ping)
    assert caught.value.param == "v"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fence": "1"}, "fence"),
        ({"grant": {"worker_id": "decode-0"}}, "grant.incarnation"),
        ({"sampling": {"max_tokens": 1, "seed": []}}, "sampling.seed"),
        ({"type": "run_" * 50_000}, "type"),
    ],
)
def test_an_error_has_the_path_of_the_field_and_stays_short(change: dict[str, object], field: str) -> None:
    """Whoever sent the message finds the place, and the refusal that carries the text always fits into a message."""
    with pytest.raises(CodecError) as caught:
        decode(json.dumps(json.loads(encode(RUN)) | change).encode(), RunPrefill)
    assert caught.value.param == field
    assert len(caught.value.message) < 500
