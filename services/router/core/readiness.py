"""Whether the mesh is complete enough to be given requests."""

from collections.abc import Sequence

from contracts.workers import WorkerRole, WorkerState
from services.router.core.mesh_view import MeshView
from services.router.core.placement import candidates, why_no_way


def missing(view: MeshView, *, model: str, expected: Sequence[str]) -> list[str]:
    """Say what is not there yet; nothing means ready.

    With `expected` workers: each of them is ready, and each prefill worker among them is linked to each decode worker
    among them. Without: there is one complete way through the mesh.
    """
    if expected:
        problems = [problem for worker_id in expected if (problem := _worker_problem(view, worker_id))]
        present = [view.workers[worker_id] for worker_id in expected if worker_id in view.workers]
        decodes = [worker for worker in present if worker.role is WorkerRole.DECODE]
        for prefill in present:
            if prefill.role is WorkerRole.PREFILL:
                problems += [problem for decode in decodes if (problem := view.link_problem(prefill, decode))]
        if problems:
            return problems
    if next(candidates(view, model=model), None) is None:
        return [why_no_way(view, model)]
    return []


def _worker_problem(view: MeshView, worker_id: str) -> str:
    record = view.workers.get(worker_id)
    if record is None:
        return f"{worker_id} has not registered"
    return "" if record.state is WorkerState.READY else f"{worker_id} is {record.state}"
