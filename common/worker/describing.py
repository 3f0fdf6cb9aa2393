"""Asking a worker for its ranks: where their caches lie, and how their regions are reached."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from common.bus.errors import BusTimeout
from common.bus.port import Bus, Message
from common.runtime.clock import Deadline
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeRefused, DescribeWorker, WorkerDescription, WorkerRole

_WAITS_S: Final = (0.5, 1.5, 3.0)
"""How long each question for one rank waits for its answer: messages may be lost, and the same question is asked again."""


async def describe_worker(
    bus: Bus, role: WorkerRole, peer: WorkerRef, deadline: Deadline
) -> tuple[WorkerDescription, ...]:
    """All ranks of one start of a worker, asked one by one.

    Raises DEADLINE_EXCEEDED at the deadline, INCARNATION_CHANGED when another start answers, `BusError` or `CodecError` when it
    could not be found out, and what the worker refuses with.
    """
    subject = subjects.worker_rpc(role, peer.worker_id, WorkerVerb.DESCRIBE)
    found: list[WorkerDescription] = []
    num_ranks = 1
    try:
        async with deadline.timeout():
            while len(found) < num_ranks:
                reply = await _asked(bus, subject, encode(DescribeWorker(rank=len(found))), deadline)
                answer: WorkerDescription | DescribeRefused | Refused = decode(
                    reply.data,
                    WorkerDescription | DescribeRefused | Refused,  # type: ignore[arg-type]  # a union is not a type
                )
                match answer:
                    case WorkerDescription():
                        _check_start(answer, peer)
                        found.append(answer)
                        num_ranks = answer.num_ranks
                    case DescribeRefused() | Refused():
                        raise PdmeshError.from_info(answer.error)
    except TimeoutError as error:
        text = f"{peer.worker_id} did not describe itself in time"
        raise PdmeshError(text, code=ErrorCode.DEADLINE_EXCEEDED) from error
    return tuple(found)


async def _asked(bus: Bus, subject: str, question: bytes, deadline: Deadline) -> Message:
    *waits_s, last_s = _WAITS_S
    for wait_s in waits_s:
        with suppress(BusTimeout):
            return await bus.request(subject, question, timeout=min(wait_s, deadline.remaining))
    return await bus.request(subject, question, timeout=min(last_s, deadline.remaining))


def _check_start(answer: WorkerDescription, peer: WorkerRef) -> None:
    if (answer.worker_id, answer.incarnation) != (peer.worker_id, peer.incarnation):
        text = f"{answer.worker_id} {answer.incarnation} answered for {peer.worker_id} {peer.incarnation}"
        raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
