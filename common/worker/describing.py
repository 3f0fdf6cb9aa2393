"""Asking a worker for its ranks: where their caches lie, and how their regions are reached."""

from __future__ import annotations

from typing import Final

from common.bus.port import Bus
from common.runtime.clock import Deadline
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeRefused, DescribeWorker, WorkerDescription, WorkerRole

_ANSWER_S: Final = 5.0


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
                question = encode(DescribeWorker(rank=len(found)))
                reply = await bus.request(subject, question, timeout=min(_ANSWER_S, deadline.remaining))
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


def _check_start(answer: WorkerDescription, peer: WorkerRef) -> None:
    if (answer.worker_id, answer.incarnation) != (peer.worker_id, peer.incarnation):
        text = f"{answer.worker_id} {answer.incarnation} answered for {peer.worker_id} {peer.incarnation}"
        raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
