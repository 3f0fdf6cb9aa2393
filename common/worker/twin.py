"""Two workers of one id would answer for each other: the one that comes second finds the first, and does not begin."""

from __future__ import annotations

from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.lifecycle import Log
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeWorker, WorkerDescription, WorkerRole

_ANSWER_S: Final = 1.0


class WorkerIdTakenError(PdmeshError):
    """Another worker of this id serves already."""

    code = ErrorCode.DUPLICATE


async def check_unique(own: WorkerRef, bus: Bus, log: Log) -> None:
    """Raise `WorkerIdTakenError` when a worker of this id answers, of whichever role; to be called before this one does.

    A worker that was killed answers nothing, at once: its restart goes on. One that stands still is replaced, and so is one that is
    cut off from the bus: when it wakes up or comes back it finds that its lease has lapsed, or this start's record in the place of
    its own, and ends.
    """
    for role in WorkerRole:
        subject = subjects.worker_rpc(role, own.worker_id, WorkerVerb.DESCRIBE)
        try:
            reply = await bus.request(subject, encode(DescribeWorker(rank=0)), timeout=_ANSWER_S)
            other = decode(reply.data, WorkerDescription).incarnation
        except BusError:
            continue
        except PdmeshError:
            other = "of an answer that cannot be read"
        log.error("worker_id_taken", worker_id=own.worker_id, other_role=role, other_incarnation=other)
        rule = f"no two workers of a mesh have the same, and the start {other} of a {role} worker answers"
        raise WorkerIdTakenError(f"worker_id: {own.worker_id!r} is not allowed; the rule is: {rule}")
