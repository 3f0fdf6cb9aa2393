"""Whether the mesh is complete enough to be given requests."""

from collections.abc import Mapping, Sequence

from contracts.workers import LinkState, WorkerRecord, WorkerRole, WorkerState
from services.router.core.placement import candidates, why_no_way


def missing(records: Mapping[str, WorkerRecord], *, model: str, expected: Sequence[str]) -> list[str]:
    """Say what is not there yet; nothing means ready.

    With `expected` workers: each of them is ready, and each prefill worker among them is linked to each decode worker
    among them. Without: there is one complete way through the mesh.
    """
    if expected:
        problems = [problem for worker_id in expected if (problem := _worker_problem(records, worker_id))]
        present = [records[worker_id] for worker_id in expected if worker_id in records]
        decodes = [worker for worker in present if worker.role is WorkerRole.DECODE]
        for prefill in present:
            if prefill.role is WorkerRole.PREFILL:
                problems += [problem for decode in decodes if (problem := _link_problem(prefill, decode))]
        if problems:
            return problems
    if next(candidates(records, model=model), None) is None:
        return [why_no_way(records, model)]
    return []


def _worker_problem(records: Mapping[str, WorkerRecord], worker_id: str) -> str:
    record = records.get(worker_id)
    if record is None:
        return f"{worker_id} has not registered"
    return "" if record.state is WorkerState.READY else f"{worker_id} is {record.state}"


def _link_problem(prefill: WorkerRecord, decode: WorkerRecord) -> str:
    for link in prefill.links:
        if (link.worker_id, link.incarnation) == (decode.worker_id, decode.incarnation):
            if link.state is LinkState.LINKED:
                return ""
            return f"{prefill.worker_id} has refused {decode.worker_id}: {link.reason}"
    return f"{prefill.worker_id} is not linked to {decode.worker_id} yet"
