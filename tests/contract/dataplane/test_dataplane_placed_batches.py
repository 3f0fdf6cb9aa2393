"""A pattern at several places is the same as its runs, on every data-plane adapter."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from common.dataplane.port import Outcome, TransferResult
from common.layout.joining import pattern_of
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch
from tests.contract.dataplane.bench import GOOD, GRANT, LENGTH, POISON, Bench, soon
from tests.contract.dataplane.test_dataplane_bytes import expected_after


def placed(runs: Sequence[Run], *bases: tuple[int, int]) -> RunBatch:
    """The same pattern at several places, as a pusher sends the layers of a chunk."""
    pattern = pattern_of(runs)
    return RunBatch(Placed(pattern, local, remote) for local, remote in bases)


def scattered_blocks(length: int) -> list[Run]:
    """Blocks in no order on either side."""
    return [
        Run(local_offset=length * (i * 7 % 31), remote_offset=2 * length * (i * 11 % 31), length=length)
        for i in range(31)
    ]


BATCHES = {
    "flat": placed([Run(local_offset=0, remote_offset=0, length=40_000)], (0, 0), (50_000, 100_001)),
    "strided": placed(
        [Run(local_offset=3, remote_offset=0, length=512, count=20, local_stride=512, remote_stride=1024)],
        (0, 0),
        (9, 512),
        (100_000, 500_000),
    ),
    "scattered": placed(scattered_blocks(2048), (0, 0), (4096, 300_000), (17, 600_005)),
    "scattered, odd length": placed(scattered_blocks(701), (0, 0), (5, 300_001)),
    "regular source": placed(
        [Run(local_offset=512 * i, remote_offset=512 * (i * 7 % 31), length=512) for i in range(31)],
        (64, 0),
        (0, 70_000),
    ),
    "nothing": placed([], (0, 0), (2**70, -5)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_moves_exactly_the_bytes_of_its_runs(bench: Bench, batch: RunBatch) -> None:
    """A pattern at several places is the same as all of its runs, one by one: pushed and pulled."""
    result = bench.write(batch)
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in batch))
    written = bytes(bench.target.data)
    assert written == expected_after(bytes(bench.source.data), batch, bytes([POISON]) * LENGTH)
    bench.source.data[:] = bytes(LENGTH)
    assert bench.remote.read(batch, bench.source, GRANT, soon()).outcome is Outcome.DONE
    back = [
        msgspec.structs.replace(
            run,
            local_offset=run.remote_offset,
            remote_offset=run.local_offset,
            local_stride=run.remote_stride,
            remote_stride=run.local_stride,
        )
        for run in batch
    ]
    assert bytes(bench.source.data) == expected_after(written, back, bytes(LENGTH))


@pytest.mark.parametrize(
    "runs", [[GOOD] * 3, scattered_blocks(64), [msgspec.structs.replace(GOOD, count=9, local_stride=16)]]
)
@pytest.mark.parametrize("base", [(-1, 0), (0, -1), (LENGTH - 15, 0), (0, LENGTH - 15), (2**70, 0), (0, -(2**70))])
def test_a_pattern_placed_out_of_bounds_is_refused(bench: Bench, runs: list[Run], base: tuple[int, int]) -> None:
    """One misplaced pattern refuses the whole batch before a byte of it moves, and the reason names a run of it."""
    batch = placed(runs, (0, 0), base, (0, 0))
    before = bytes(bench.source.data)
    for result in (bench.write(batch), bench.remote.read(batch, bench.source, GRANT, soon())):
        assert (result.outcome, result.nbytes, "out of bounds" in result.reason) == (Outcome.FAILED_QUIESCED, 0, True)
    assert bench.untouched()
    assert bytes(bench.source.data) == before
