"""Ids, subjects, errors and the codec: the rules that every message obeys."""

import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import ids, subjects
from contracts.codec import MAX_MESSAGE_BYTES, SCHEMA_VERSION, decode, encode
from contracts.errors import ERROR_RULES, CodecError, ErrorCode, ErrorInfo, InvalidValueError, PdmeshError
from contracts.requests import Accepted, CancelRequest, PromptFrame


def test_every_error_code_has_a_rule() -> None:
    """The table is exhaustive, and its statuses are errors."""
    assert set(ERROR_RULES) == set(ErrorCode)
    assert all(400 <= rule.http_status < 600 for rule in ERROR_RULES.values())


def test_an_error_survives_its_journey() -> None:
    """What was raised in one process is raised again, with code and field, in another."""
    error = InvalidValueError(field="tp", value=3, rule="1, 2 or 4")
    info = msgspec.json.decode(msgspec.json.encode(error.info), type=ErrorInfo)
    again = PdmeshError.from_info(info)
    assert (again.code, again.param, str(again)) == (ErrorCode.INVALID_REQUEST, "tp", str(error))
    assert "3" in str(error)
    assert "1, 2 or 4" in str(error)


def test_a_long_value_is_cut_in_the_text_of_its_error() -> None:
    """An error about ten megabytes is not ten megabytes long."""
    assert len(str(InvalidValueError(field="prompt", value="x" * 10_000_000, rule="short"))) < 300


@pytest.mark.parametrize("bad", ["", "-a", "_a", "A", "a.b", "a b", "a*", "a>", "ä", "a" * 64, "a\n"])
def test_what_cannot_be_a_subject_token_is_refused_by_name(bad: str) -> None:
    """Wildcards, dots, spaces, upper case and line ends never reach a subject."""
    with pytest.raises(InvalidValueError, match="worker_id"):
        subjects.cancel_filter(bad)


@given(st.text(string.ascii_lowercase + string.digits + "_-", min_size=1, max_size=63))
def test_any_legal_token_makes_a_subject_of_the_same_number_of_tokens(token: str) -> None:
    """No id can add a level to a subject or take one away."""
    if token[0] in "_-":
        return
    assert subjects.worker_rpc("decode", token, subjects.WorkerVerb.COMMIT).count(".") == 5
    assert subjects.verb_of(subjects.worker_rpc("decode", token, subjects.WorkerVerb.COMMIT)) == "commit"
    assert subjects.event("broker", token, "taken_over").split(".")[4] == token


def test_ids_are_legal_tokens_and_name_their_attempt() -> None:
    """Fresh ids pass the check that they must pass everywhere else."""
    request = ids.request_id(bytes(range(ids.ENTROPY_BYTES)))
    assert ids.check_token("handoff_id", ids.handoff_id(request, 3)) == f"{request}-3"
    assert ids.check_token("incarnation", ids.incarnation(b"\xff" * 10))
    with pytest.raises(InvalidValueError, match="entropy"):
        ids.request_id(b"short")
    with pytest.raises(InvalidValueError, match="attempt"):
        ids.handoff_id(request, -1)


def test_the_table_names_every_subject_once() -> None:
    """What the builders spell is what the table says."""
    spelled = {row.subject for row in subjects.TABLE}
    assert len(spelled) == len(subjects.TABLE)
    assert subjects.parts("{handoff}".strip("{}")) in {s.replace("{handoff}", "handoff") for s in spelled}
    assert subjects.tokens("router", "request") in {
        s.replace("{router}", "router").replace("{request}", "request") for s in spelled
    }


def test_oversized_messages_are_refused_on_both_ends() -> None:
    """Neither written nor read: the server would cut the connection."""
    frame = PromptFrame(
        handoff_id="r1-0",
        index=0,
        num_frames=1,
        num_prompt_tokens=1,
        prompt_hash="",
        timeout_ms=1,
        ids_b64="A" * MAX_MESSAGE_BYTES,
    )
    with pytest.raises(CodecError, match="at most"):
        encode(frame)
    with pytest.raises(CodecError, match="at most"):
        decode(msgspec.json.encode(frame), PromptFrame)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"type":"accepted"}', b'{"type":"refused","handoff_id":"a"}']
)
def test_what_is_not_the_message_is_refused(data: bytes) -> None:
    """Garbage, truncation, another message: one kind of error."""
    with pytest.raises(CodecError):
        decode(data, Accepted)


def test_unknown_fields_are_ignored_and_newer_versions_refused() -> None:
    """A newer peer may add fields; a changed meaning raises the version."""
    message = CancelRequest(handoff_id="r1-0", reason="client left")
    content = msgspec.json.decode(encode(message))
    assert decode(msgspec.json.encode(content | {"later": 1}), CancelRequest) == message
    with pytest.raises(CodecError, match="schema version"):
        decode(msgspec.json.encode(content | {"v": SCHEMA_VERSION + 1}), CancelRequest)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_codec_error(data: bytes) -> None:
    """Whatever arrives on a subject, the reader meets one kind of error."""
    try:
        decode(data, PromptFrame)
    except CodecError:
        return
