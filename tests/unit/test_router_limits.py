"""What a router holds is bounded, each thing by a rule of its own; and how much it may try again."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import structlog

from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline, SystemClock
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import FinishReason, MixedRoute, SamplingParams, TokenFrame, WorkerRef
from services.router import app
from services.router.admission import Admission
from services.router.canceller import MAX_LATE_CANCELS, Canceller
from services.router.connection import SEND_BUFFER_BYTES, WRITE_BUFFER_BYTES
from services.router.core.prompt_frames import pack_ids, prompt_hash
from services.router.core.remainder import Remainder, end_of, remainder
from services.router.core.retry import may_take_reserve
from services.router.core.retry_after import MAX_ENDS, WINDOW_S, Throughput, seconds_until_room
from services.router.core.retry_budget import RetryBudget
from services.router.core.token_order import MAX_WAITING_FRAMES, TokenOrder
from services.router.dispatch import Attempt, Job, Submission
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from services.router.token_inbox import Mailbox

PACKED = pack_ids([7, 8])
SAMPLING = SamplingParams(max_tokens=4, min_tokens=2, seed=1)
WHOLE = Remainder(packed=PACKED, digest=prompt_hash(PACKED), sampling=SAMPLING)


def _frame(index: int) -> TokenFrame:
    return TokenFrame(handoff_id="r-0", request_id="r", attempt=0, index=index, token_ids=(1,))


def test_requests_under_way_are_bounded() -> None:
    """One more is refused, and there is room again once one has ended."""
    admission = Admission(RouterMetrics(Metrics()), limit=2)
    with admission.enter(2):
        with pytest.raises(PdmeshError) as caught:
            admission.check()
        assert caught.value.code is ErrorCode.OVERLOADED
    admission.check()


def test_frames_that_wait_for_their_client_are_bounded() -> None:
    """What does not fit is thrown away, and the stream is told to end."""
    told: list[PdmeshError] = []
    mailbox = Mailbox(limit=3, overflowed=told.append)
    for index in range(10):
        mailbox.put(_frame(index))
    assert (len(mailbox), len(told)) == (3, 7)


def test_frames_that_wait_for_an_earlier_one_are_bounded() -> None:
    """Then it is no reordering but a loss."""
    order = TokenOrder(attempt=0)
    for place in range(1, MAX_WAITING_FRAMES + 1):
        order.accept(_frame(2 * place))
    with pytest.raises(PdmeshError, match="is missing while 257 later frames wait"):
        order.accept(_frame(2 * MAX_WAITING_FRAMES + 2))


async def test_cancels_under_way_are_bounded() -> None:
    """What has no room is left out, and logged: the broker takes back at the deadline what nobody cancels."""
    server = MemoryServer(SystemClock())
    route = MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="i"))
    job = Job(request_id="r", whole=WHOLE, stops=())
    attempt = Attempt(job=job, remainder=WHOLE, number=0, handoff_id="r-0", route=route)
    log: Any = structlog.get_logger()
    async with asyncio.TaskGroup() as group:
        tasks = BoundedTasks(group, name="cancel", limit=2)
        canceller = Canceller(server.connect(), SystemClock(), log, tasks, timeout_s=60.0)
        for _ in range(5):
            canceller.cancel(attempt, Submission.ACCEPTED, Deadline.after(SystemClock(), 60.0), reason="test")
        assert (tasks.running, tasks.refused) == (2, 3)
        tasks.cancel()


def test_every_bound_is_a_number() -> None:
    """All that a router may hold: none of these is without an end by default."""
    settings = RouterSettings(model=".")  # type: ignore[arg-type]  # where it lies does not matter here
    bounds = (
        settings.max_connections,
        settings.max_body_bytes,
        settings.max_bodies_bytes,
        settings.max_concurrent_requests,
        settings.max_choices,
        settings.max_waiting_frames,
        settings.max_attempts,
        settings.max_failures,
        settings.max_preemptions,
        settings.retry_budget,
        SEND_BUFFER_BYTES,
        WRITE_BUFFER_BYTES,
        MAX_WAITING_FRAMES,
        MAX_ENDS,
        app._MAX_CANCELS,
        app._MAX_ACKNOWLEDGEMENTS,
        MAX_LATE_CANCELS,
    )
    assert all(0 < bound < math.inf for bound in bounds)
    assert settings.max_concurrent_requests <= min(app._MAX_CANCELS, app._MAX_ACKNOWLEDGEMENTS)
    assert settings.max_concurrent_requests <= app._MAX_CANCELS - MAX_LATE_CANCELS


def test_the_budget_of_retries_is_a_share_of_requests_above_a_floor() -> None:
    """It begins full; then eight requests earn one, and every second of quiet the floor's."""
    budget = RetryBudget(share=0.125, floor_per_s=0.5, capacity=2, now=0.0)

    def take(now: float, count: int) -> list[bool]:
        return [budget.take(now, from_reserve=True) for _ in range(count)]

    assert take(0.0, 3) == [True, True, False]
    for _ in range(8):
        budget.note_request()
    assert take(0.0, 2) == [True, False]
    assert take(2.0, 2) == [True, False]
    for _ in range(1000):
        budget.note_request()
    assert budget.left == 2.0


@pytest.mark.parametrize(("capacity", "kept"), [(1, 0), (2, 1), (5, 2), (512, 256)])
def test_half_of_the_retries_is_kept_back(capacity: int, kept: int) -> None:
    """However many take of the rest."""
    budget = RetryBudget(share=0.0, floor_per_s=1e-9, capacity=capacity, now=0.0)
    assert sum(budget.take(0.0, from_reserve=False) for _ in range(3 * capacity)) == capacity - kept
    assert sum(budget.take(0.0, from_reserve=True) for _ in range(3 * capacity)) == kept


@pytest.mark.parametrize(
    ("code", "begun", "expected"),
    [
        (ErrorCode.OVERLOADED, False, False),
        (ErrorCode.DRAINING, False, False),
        (ErrorCode.OVERLOADED, True, True),
        (ErrorCode.WORKER_LOST, False, True),
        (ErrorCode.WORKER_LOST, True, True),
    ],
)
def test_who_was_turned_away_has_no_part_in_the_reserve(code: ErrorCode, begun: bool, expected: bool) -> None:
    """An answer that has begun has, whatever stopped it; so has a request whose worker is lost."""
    assert may_take_reserve(PdmeshError("planted", code=code), begun=begun) is expected


def test_a_client_is_told_when_there_will_be_room() -> None:
    """Those ahead of it and it itself, at the rate at which requests end; nothing is made up when none has ended."""
    throughput = Throughput()
    assert seconds_until_room(ahead=9, per_second=throughput.per_second(0.0), least=1, most=60) == 1
    for tick in range(21):
        throughput.ended(tick / 2)
    rate = throughput.per_second(10.0)
    assert rate == pytest.approx(2.1)
    assert seconds_until_room(ahead=9, per_second=rate, least=1, most=60) == 5
    assert seconds_until_room(ahead=0, per_second=rate, least=1, most=60) == 1
    assert seconds_until_room(ahead=900, per_second=rate, least=1, most=60) == 60
    assert throughput.per_second(10.0 + WINDOW_S + 1) == 0.0


def test_what_is_left_counts_what_was_delivered() -> None:
    """Tokens move from the answer to the prompt; nothing else changes."""
    left = remainder(WHOLE, [9])
    assert left.packed == pack_ids([7, 8, 9])
    assert (left.num_prompt_tokens, left.num_delivered_tokens, left.digest) == (3, 1, prompt_hash(left.packed))
    assert (left.sampling.max_tokens, left.sampling.min_tokens, left.sampling.seed) == (3, 1, 1)
    assert remainder(WHOLE, [9, 9, 9]).sampling.min_tokens == 0
    assert remainder(WHOLE, []) == WHOLE


@pytest.mark.parametrize(
    ("delivered", "expected"),
    [
        ([], None),
        ([1, 5], None),
        ([1, 1, 5], FinishReason.STOP),
        ([1, 1, 1], None),
        ([1, 1, 1, 1], FinishReason.LENGTH),
        ([1, 1, 1, 5], FinishReason.STOP),
    ],
)
def test_a_lost_end_is_told_from_the_tokens(delivered: list[int], expected: FinishReason | None) -> None:
    """By the rule of the workers: an end of sequence (5) counts behind min_tokens (2), the length in any case."""
    assert end_of(delivered, SAMPLING, {5}) is expected


def test_a_deadline_is_no_room_for_a_retry() -> None:
    """What was late is late elsewhere, too."""
    assert not PdmeshError("late", code=ErrorCode.DEADLINE_EXCEEDED).info.rule.retryable
    assert Deadline.after(SystemClock(), -1.0).remaining_ms == 0
