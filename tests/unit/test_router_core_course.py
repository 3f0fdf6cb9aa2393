"""How far a request has come over its attempts, and the small counts that a router keeps beside."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import FinishReason, SamplingParams, WorkerRef
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.router.core.course import Course
from services.router.core.detokenizer import whole_text
from services.router.core.placement import Loads
from services.router.core.prompt_frames import pack_ids
from services.router.core.remainder import Remainder
from services.router.core.retry_after import lacks_a_role, num_ahead
from services.router.core.text_stream import TextPiece, TextStream
from services.router.core.usage import UsageMeter
from services.router.core.vocabulary import Vocabulary, _byte_of_char

VOCABULARY = Vocabulary(vocab={"a": 0, "b": 1, "Ã": 2, "<end>": 3}, added={3: "<end>"}, silent={3}, vocab_size=4)
PACKED = pack_ids([0, 1, 0])
WHOLE = Remainder(
    packed=PACKED,
    digest=hashlib.sha256(PACKED).hexdigest(),
    sampling=SamplingParams(max_tokens=4, min_tokens=1, seed=1),
)
FIRST, SECOND = (WorkerRef(worker_id=f"w{n}", incarnation="i") for n in range(2))
LOST = PdmeshError("gone", code=ErrorCode.WORKER_LOST)
FULL = PdmeshError("full", code=ErrorCode.OVERLOADED)


def course(*stops: str, redispatch: bool = True) -> Course:
    """A request of which nothing has come; it ends with token 3."""
    return Course(WHOLE, TextStream(VOCABULARY, stops=stops), eos_token_ids=(3,), redispatch=redispatch)


def test_a_request_of_which_nothing_came_is_asked_for_whole() -> None:
    """The first attempt has number 0; nothing has failed, and nobody is to blame."""
    begun = course()
    assert (begun.attempt, begun.num_tokens, begun.num_cached_tokens, begun.failure, begun.end) == (0, 0, 0, None, None)
    assert begun.remainder is WHOLE
    assert not begun.blamed
    assert begun.may_go_on


def test_what_came_is_the_end_of_the_next_attempts_prompt() -> None:
    """Tokens of all attempts together; the text goes on where it was."""
    begun = course()
    assert begun.push([0, 1]) == TextPiece("ab", (0, 1))
    assert begun.push([0]) == TextPiece("a", (0,))
    left = begun.remainder
    assert (begun.num_tokens, left.num_delivered_tokens, left.num_prompt_tokens) == (3, 3, 6)
    assert left.packed == PACKED + pack_ids([0, 1, 0])
    assert (left.sampling.max_tokens, left.sampling.min_tokens) == (1, 0)
    assert begun.end is None
    assert begun.push([1]).text == "b"
    assert begun.end is FinishReason.LENGTH


def test_an_end_of_sequence_or_a_stop_string_is_an_end_that_nobody_has_to_say() -> None:
    """What follows a stop string does not count."""
    ended = course()
    ended.push([0, 3])
    assert ended.end is FinishReason.STOP
    stopped = course("b")
    assert stopped.push([0, 1, 0]) == TextPiece("a", (0, 1), stopped=True)
    assert (stopped.num_tokens, stopped.end) == (2, FinishReason.STOP)


def test_text_that_is_held_back_comes_with_the_end() -> None:
    """Nothing is lost between attempts."""
    held = course("ab")
    assert held.push([0]).text == ""
    assert held.finish() == TextPiece("a", ())


def test_a_client_that_wants_no_other_attempt_gets_none_once_tokens_came() -> None:
    """Before the first token it cannot tell."""
    begun = course(redispatch=False)
    assert begun.may_go_on
    begun.push([0])
    assert not begun.may_go_on


def test_failures_are_counted_with_those_to_blame() -> None:
    """The last one is remembered; the next attempt has the next number; a busy worker is blamed less than a lost one."""
    begun = course()
    begun.failed(LOST, (FIRST, SECOND), delivered=False)
    assert (begun.attempt, begun.failure) == (1, LOST)
    assert (begun.failures.num_in_all, begun.failures.num_in_a_row) == (1, 1)
    begun.failed(FULL, (SECOND,), delivered=False)
    assert (begun.attempt, begun.failure, begun.failures.num_in_a_row) == (2, FULL, 2)
    begun.failed(FULL, (SECOND,), delivered=True)
    assert (begun.attempt, begun.failures.num_in_a_row, begun.failures.num_in_all) == (3, 1, 3)
    assert begun.blamed == {FIRST: 1000, SECOND: 1002}


def test_placements_are_counted() -> None:
    """Each has a turn of its own."""
    loads = Loads()
    assert [loads.next_turn() for _ in range(3)] == [1, 2, 3]


def record(role: WorkerRole, num_waiting: int) -> WorkerRecord:
    """A worker at which requests wait for memory."""
    return WorkerRecord(
        worker_id=role,
        incarnation="i",
        role=role,
        state=WorkerState.READY,
        model="tiny",
        model_fingerprint="f",
        tp=1,
        dp=1,
        dcp=1,
        block_size=16,
        num_blocks=100,
        num_slots=4,
        max_sequence_tokens=1000,
        load=WorkerLoad(num_free_blocks=0, num_free_slots=0, num_waiting=num_waiting, num_running=9),
    )


def test_those_ahead_wait_where_answers_are_generated() -> None:
    """Who waits at a prefill worker has a place at decode."""
    workers = [record(WorkerRole.PREFILL, 100), record(WorkerRole.DECODE, 20), record(WorkerRole.MIXED, 3)]
    assert num_ahead(workers) == 23
    assert num_ahead(workers[:1]) == num_ahead([]) == 0


def test_without_a_worker_of_each_role_no_way_can_lead_through() -> None:
    """One that is mixed is a way by itself; one that drains or starts is none yet."""
    prefill, decode, mixed = (record(role, 0) for role in (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED))
    assert lacks_a_role([])
    assert lacks_a_role([prefill])
    assert lacks_a_role([prefill, msgspec.structs.replace(decode, state=WorkerState.DRAINING)])
    assert not lacks_a_role([prefill, decode])
    assert not lacks_a_role([mixed])


def test_tokens_are_counted_over_all_choices_and_cached_ones_once_a_prompt() -> None:
    """The last word on a prompt counts."""
    meter = UsageMeter(num_prompt_tokens=10)
    meter.add_tokens(3)
    meter.add_tokens(4)
    meter.note_cached(0, 2)
    meter.note_cached(0, 5)
    meter.note_cached(1, 1)
    usage = meter.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 7, 17)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 6


def test_bytes_that_are_no_text_are_replaced() -> None:
    """Half a character is shown as such, not refused."""
    assert whole_text(VOCABULARY, [0, 2, 1, 3]) == "a\ufffdb<end>"


@pytest.mark.parametrize(
    ("char", "byte"),
    [
        ("!", 0x21),
        ("~", 0x7E),
        ("¡", 0xA1),
        ("¬", 0xAC),
        ("®", 0xAE),
        ("ÿ", 0xFF),
        ("Ā", 0x00),
        ("ł", 0xA0),
        ("Ġ", 0x20),
        ("ġ", 0x7F),
        ("Ń", 0xAD),
    ],
)
def test_each_byte_has_a_character_of_its_own(char: str, byte: int) -> None:
    """Printable ones stand for themselves, the others follow each other from U+0100 on."""
    table = _byte_of_char()
    assert sorted(table.values()) == list(range(256))
    assert len(table) == 256
    assert table[char] == byte
