"""The small parts between a request and the bus: prompt frames, retries, mailboxes, interruptions, usage."""

import asyncio
import base64
import hashlib

import pytest

from common.runtime.clock import Deadline, SystemClock
from contracts.codec import MAX_MESSAGE_BYTES, encode
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import TokenFrame, WorkerRef
from services.router.core.prompt_frames import MAX_FRAME_B64_BYTES, pack_ids, prompt_frames, prompt_hash
from services.router.core.retry import Failures, RetryPolicy, blame
from services.router.core.usage import UsageMeter
from services.router.interruption import Interruptible
from services.router.token_inbox import Mailbox

POLICY = RetryPolicy(max_attempts=3, max_failures=5, max_preemptions=6, first_delay_s=0.1, max_delay_s=0.25)


@pytest.mark.parametrize("count", [1, 24_575, 24_576, 24_577, 60_000])
def test_frames_are_bounded_and_complete(count: int) -> None:
    """At the edges of a frame, too: no frame is empty, and each is small enough for the bus."""
    packed = pack_ids(range(count))
    frames = list(prompt_frames(packed, handoff_id="r1-0", digest=prompt_hash(packed), timeout_ms=5))
    assert [frame.index for frame in frames] == list(range(frames[0].num_frames))
    assert all(0 < len(frame.ids_b64) <= MAX_FRAME_B64_BYTES for frame in frames)
    assert len(encode(frames[0])) < MAX_MESSAGE_BYTES
    assert b"".join(base64.b64decode(frame.ids_b64) for frame in frames) == packed
    assert {frame.num_prompt_tokens for frame in frames} == {count}


def test_ids_are_little_endian_and_the_hash_is_of_their_bytes() -> None:
    """Both ends compute the same."""
    packed = pack_ids([1, 258, 4_294_967_295])
    assert packed == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 255])
    assert prompt_hash(packed) == hashlib.sha256(packed).hexdigest()
    with pytest.raises(OverflowError):
        pack_ids([1 << 32])


def test_only_curable_errors_are_tried_again() -> None:
    """And only so many times without a token between them, after growing delays with a bound."""
    full = PdmeshError("full", code=ErrorCode.OVERLOADED)
    failures = Failures()
    tried = []
    for _ in range(3):
        failures.note(full, delivered=False)
        tried.append((POLICY.may_retry(full, failures), POLICY.delay_s(full, failures, chance=1.0)))
    assert tried == [(True, 0.1), (True, 0.2), (False, 0.25)]
    wrong = PdmeshError("wrong", code=ErrorCode.INVALID_REQUEST)
    assert not POLICY.may_retry(wrong, Failures(num_in_a_row=1, num_in_all=1))
    assert POLICY.delay_s(full, Failures(num_in_a_row=1), chance=0.0) == 0.05


def test_tokens_begin_the_row_of_failures_anew_but_not_their_sum() -> None:
    """A stream may outlive several workers; a request that ends every worker that it comes to does not go on for ever."""
    lost = PdmeshError("gone", code=ErrorCode.WORKER_LOST)
    failures = Failures()
    tried = []
    for _ in range(5):
        failures.note(lost, delivered=True)
        tried.append(POLICY.may_retry(lost, failures))
    assert tried == [True, True, True, True, False]


def test_a_preempted_attempt_has_not_failed() -> None:
    """It counts apart, with a bound of its own, and only the worker that decodes is avoided, as one that is busy."""
    preempted = PdmeshError("no block is left", code=ErrorCode.PREEMPTED)
    failures = Failures(num_in_a_row=2, num_in_all=4)
    tried = []
    for _ in range(7):
        failures.note(preempted, delivered=False)
        tried.append(POLICY.may_retry(preempted, failures))
    assert tried == [True] * 6 + [False]
    assert (failures.num_in_a_row, failures.num_in_all) == (2, 4)
    workers = [WorkerRef(worker_id=name, incarnation="i") for name in ("prefill-0", "decode-0")]
    assert blame(preempted, workers) == {workers[1]: 1}
    assert blame(PdmeshError("", code=ErrorCode.WORKER_LOST), workers) == dict.fromkeys(workers, 1000)


def test_a_mailbox_is_bounded() -> None:
    """What does not fit is dropped, and the reader is told to end."""
    told: list[PdmeshError] = []
    mailbox = Mailbox(limit=2, overflowed=told.append)
    for index in range(3):
        mailbox.put(TokenFrame(handoff_id="r-0", request_id="r", attempt=0, index=index))
    assert [error.code for error in told] == [ErrorCode.CANCELLED]


async def test_a_mailbox_has_frames_of_one_attempt() -> None:
    """What a superseded attempt has sent, or sends later, is thrown away, and takes nobody's room."""
    mailbox = Mailbox(limit=2, overflowed=_never)
    old, new = (TokenFrame(handoff_id=f"r-{each}", request_id="r", attempt=each, index=each) for each in range(2))
    mailbox.put(old)
    mailbox.begin(1)
    for frame in (old, new, old, old):
        mailbox.put(frame)
    assert await mailbox.get(0.0) == new
    assert await mailbox.get(0.0) is None


def _never(error: PdmeshError) -> None:
    raise error


async def test_a_deadline_becomes_an_error_of_ours() -> None:
    """Whoever waits inside gets it."""
    with pytest.raises(PdmeshError) as caught:
        async with Interruptible(Deadline.after(SystemClock(), 0.0)):
            await asyncio.Event().wait()
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


async def test_an_interruption_ends_the_work_with_its_reason() -> None:
    """The first reason counts; before and after the work an interruption does nothing."""
    scope = Interruptible(Deadline.after(SystemClock(), 60.0))
    scope.interrupt(PdmeshError("too early"))

    async def work() -> None:
        async with scope:
            scope.interrupt(PdmeshError("draining"))
            scope.interrupt(PdmeshError("second"))
            await asyncio.Event().wait()

    with pytest.raises(PdmeshError, match="draining"):
        await work()
    scope.interrupt(PdmeshError("too late"))
    assert str(scope.reason) == "draining"


async def test_a_timeout_inside_is_not_taken_for_the_deadline() -> None:
    """Other timeouts pass through."""
    with pytest.raises(TimeoutError):
        async with Interruptible(Deadline.after(SystemClock(), 60.0)):
            raise TimeoutError


def test_usage_counts_each_prompt_once() -> None:
    """Cached tokens are the last that prefill said of each prompt."""
    meter = UsageMeter(num_prompt_tokens=30)
    meter.add_tokens(2)
    meter.note_cached(0, 16)
    meter.note_cached(0, 16)
    meter.note_cached(1, 4)
    usage = meter.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 2, 32)
    assert usage.prompt_tokens_details.cached_tokens == 20
