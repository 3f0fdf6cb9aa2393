"""What a transfer is refused for before a byte of it moves, whatever the transport."""

from __future__ import annotations

from collections.abc import Sequence

from common.dataplane.port import DataPlaneError, WriteGrant
from common.layout.run import Run
from common.layout.run_batch import RunBatch
from contracts.dataplane import DESCRIPTOR_VERSION, Memory, RegionDescriptor


def check_descriptor(descriptor: RegionDescriptor, transport: str) -> None:
    """Raise `DataPlaneError` when a region is not one that `transport` reaches in this build."""
    if (descriptor.transport, descriptor.version, descriptor.memory) != (transport, DESCRIPTOR_VERSION, Memory.HOST):
        shown = f"{descriptor.transport} version {descriptor.version} in {descriptor.memory} memory"
        rule = f"only {transport} version {DESCRIPTOR_VERSION} in host memory"
        raise DataPlaneError(f"descriptor: {shown} cannot be reached; {rule}")


def check_grant(grant: WriteGrant, num_cells: int) -> str:
    """Why `grant` cannot be one of a region with `num_cells` cells; "" when it can."""
    if not grant.cells:
        return "the grant names no cell"
    if not 0 <= grant.lock_cell < num_cells:
        return f"the grant names cell {grant.lock_cell}, outside [0, {num_cells})"
    if min(grant.cells) < 0 or max(grant.cells) >= num_cells:
        wrong = next(cell for cell in grant.cells if not 0 <= cell < num_cells)
        return f"the grant names cell {wrong}, outside [0, {num_cells})"
    return ""


def check_runs(runs: Sequence[Run], local_length: int, remote_length: int) -> str:
    """Why `runs` may not be copied between data of these lengths; "" when they may.

    The patterns of a batch know the first and the last byte that they touch: when these are within bounds, so is every run.
    """
    if isinstance(runs, RunBatch):
        for each in runs.placed:
            if not each.is_within(local_length, remote_length):
                break
        else:
            return ""
    for index, run in enumerate(runs):
        if (
            run.count == 1
            and 0 <= run.local_offset <= local_length - run.length <= local_length
            and 0 <= run.remote_offset <= remote_length - run.length
        ):
            continue  # as most are; what follows says what is wrong
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
