"""The small parts between a request and the bus: prompt frames, retries, mailboxes, interruptions, usage."""

import asyncio
import base64
import hashlib

import pytest

from common.runtime.clock import Deadline, SystemClock
from contracts.codec import MAX_MESSAGE_BYTES, encode
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import TokenFrame
from services.router.core.prompt_frames import MAX_FRAME_B64_BYTES, pack_ids, prompt_frames, prompt_hash
from services.router.core.retry import RetryPolicy
from services.router.core.usage import UsageMeter
from services.router.interruption import Interruptible
from services.router.token_inbox import Mailbox

POLICY = RetryPolicy(max_attempts=3, first_delay_s=0.1, max_delay_s=0.25)


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


def test_only_curable_errors_before_the_first_token_are_tried_again() -> None:
    """And only so many times, after growing delays with a bound."""
    full = PdmeshError("full", code=ErrorCode.OVERLOADED)
    assert POLICY.may_retry(full, attempt=1, num_delivered_tokens=0)
    assert not POLICY.may_retry(full, attempt=2, num_delivered_tokens=0)
    assert not POLICY.may_retry(full, attempt=0, num_delivered_tokens=1)
    wrong = PdmeshError("wrong", code=ErrorCode.INVALID_REQUEST)
    assert not POLICY.may_retry(wrong, attempt=0, num_delivered_tokens=0)
    assert [POLICY.delay_s(attempt=attempt, chance=1.0) for attempt in range(3)] == [0.1, 0.2, 0.25]
    assert POLICY.delay_s(attempt=0, chance=0.0) == 0.05


def test_a_mailbox_is_bounded() -> None:
    """What does not fit is dropped, and the reader is told to end."""
    told: list[PdmeshError] = []
    mailbox = Mailbox(limit=2, overflowed=told.append)
    for index in range(3):
        mailbox.put(TokenFrame(handoff_id="r-0", request_id="r", attempt=0, index=index))
    assert [error.code for error in told] == [ErrorCode.CANCELLED]


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
