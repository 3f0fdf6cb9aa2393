"""Asking a worker for its ranks while messages are lost, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.bus.errors import BusTimeout
from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.describing import describe_worker
from contracts import subjects
from contracts.codec import encode
from contracts.requests import WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerDescription, WorkerRole
from tests.contract.golden_parts import MANIFEST, REGION

PEER = WorkerRef(worker_id="prefill-0", incarnation="i0")
RANK = WorkerDescription(
    worker_id=PEER.worker_id, incarnation=PEER.incarnation, num_ranks=1, manifest=MANIFEST, region=REGION
)


def asked(num_lost: int) -> tuple[Any, float]:
    """What comes of asking a worker that does not hear the first questions, and after how many seconds."""

    async def play(clock: VirtualClock) -> tuple[Any, float]:
        server = MemoryServer(clock)
        worker, asker = server.connect(), server.connect()
        subject = subjects.worker_rpc(WorkerRole.PREFILL, PEER.worker_id, WorkerVerb.DESCRIBE)
        subscription = await worker.subscribe(subject)

        async def answer() -> None:
            heard = 0
            async for question in subscription:
                heard += 1
                if heard > num_lost:
                    await question.respond(encode(RANK))

        async with asyncio.TaskGroup() as group:
            answering = group.create_task(answer(), name="worker")
            try:
                deadline = Deadline.after(clock, 10.0)
                return await describe_worker(asker, WorkerRole.PREFILL, PEER, deadline), clock.monotonic()
            except BusTimeout as error:
                return error, clock.monotonic()
            finally:
                answering.cancel()

    return run_virtual(play)


@pytest.mark.parametrize(("num_lost", "seconds"), [(0, 0.0), (1, 0.5), (2, 2.0)])
def test_a_question_that_is_lost_is_asked_again_soon(num_lost: int, seconds: float) -> None:
    """The worker's ranks are known half a second after one lost message, not after all that a caller waits."""
    found, after = asked(num_lost)
    assert found == (RANK,)
    assert after == pytest.approx(seconds, abs=1e-6)


def test_who_says_nothing_at_all_is_not_asked_for_ever() -> None:
    """Three questions and five seconds, then it counts as unreachable."""
    error, after = asked(3)
    assert isinstance(error, BusTimeout)
    assert after == pytest.approx(5.0, abs=1e-6)
