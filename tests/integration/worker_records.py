"""Records of workers that are not there, for worlds in which somebody reads `PD_WORKERS`."""

from __future__ import annotations

from typing import Any

from contracts.requests import WorkerRef
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState


def worker_record(ref: WorkerRef, role: WorkerRole, **changes: Any) -> WorkerRecord:
    """An idle worker of one rank with made-up caches. `changes` are fields of the record."""
    values: dict[str, Any] = {
        "worker_id": ref.worker_id,
        "incarnation": ref.incarnation,
        "role": role,
        "state": WorkerState.READY,
        "model": "fake",
        "model_fingerprint": "fake",
        "tp": 1,
        "dp": 1,
        "dcp": 1,
        "block_size": 16,
        "num_blocks": 64,
        "num_slots": 8,
        "max_sequence_tokens": 1024,
        "load": WorkerLoad(num_free_blocks=64, num_free_slots=8, num_waiting=0, num_running=0),
    }
    return WorkerRecord(**(values | changes))
