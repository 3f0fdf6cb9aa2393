"""What a transfer is refused for before a byte of it moves, whatever the transport."""

from __future__ import annotations

from collections.abc import Sequence

from common.dataplane.port import WriteGrant
from common.layout.run import Run


def check_grant(grant: WriteGrant, num_cells: int) -> str:
    """Why `grant` cannot be one of a region with `num_cells` cells; "" when it can."""
    if not grant.cells:
        return "the grant names no cell"
    for cell in (*grant.cells, grant.lock_cell):
        if not 0 <= cell < num_cells:
            return f"the grant names cell {cell}, outside [0, {num_cells})"
    return ""


def check_runs(runs: Sequence[Run], local_length: int, remote_length: int) -> str:
    """Why `runs` may not be copied between data of these lengths; "" when they may."""
    for index, run in enumerate(runs):
        if run.length < 0 or run.count < 0:
            return f"run {index}: length {run.length} and count {run.count} must not be negative"
        if run.nbytes == 0:
            continue
        for side, offset, stride, limit in (
            ("local", run.local_offset, run.local_stride, local_length),
            ("remote", run.remote_offset, run.remote_stride, remote_length),
        ):
            last = offset + (run.count - 1) * stride
            first, end = min(offset, last), max(offset, last) + run.length
            if first < 0 or end > limit:
                return f"run {index}: {side} bytes [{first}, {end}) are out of bounds [0, {limit})"
    return ""
