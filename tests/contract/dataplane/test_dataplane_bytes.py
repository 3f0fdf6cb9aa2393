"""Every data-plane adapter moves exactly the bytes of a transfer's runs, however many, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.dataplane.port import Outcome, TransferResult
from common.layout.run import Run
from tests.contract.dataplane.bench import GRANT, LENGTH, NUM_CELLS, PATIENCE_S, POISON, Bench, soon


def expected_after(source: bytes, runs: Sequence[Run], target: bytes) -> bytes:
    """What a correct transfer leaves in the target."""
    result = bytearray(target)
    for run in runs:
        for item in range(run.count):
            start, end = run.local_offset + item * run.local_stride, run.remote_offset + item * run.remote_stride
            result[end : end + run.length] = source[start : start + run.length]
    return bytes(result)


RUN_CASES = {
    "one": [Run(local_offset=0, remote_offset=4096, length=8192)],
    "unaligned": [
        Run(local_offset=3, remote_offset=17, length=1001),
        Run(local_offset=5001, remote_offset=2049, length=1),
    ],
    "zero length": [Run(local_offset=0, remote_offset=0, length=0), Run(local_offset=0, remote_offset=5, length=3)],
    "zero count": [Run(local_offset=0, remote_offset=0, length=8, count=0)],
    "zero length at the end": [Run(local_offset=LENGTH, remote_offset=LENGTH, length=0)],
    "none": [],
    "whole": [Run(local_offset=0, remote_offset=0, length=LENGTH)],
    "strided": [Run(local_offset=7, remote_offset=64, length=100, count=300, local_stride=256, remote_stride=1024)],
    "few strided": [Run(local_offset=7, remote_offset=64, length=100, count=3, local_stride=256, remote_stride=1024)],
    "gathered": [Run(local_offset=0, remote_offset=0, length=64, count=1000, local_stride=1024, remote_stride=64)],
    "backwards": [Run(local_offset=9000, remote_offset=0, length=10, count=9, local_stride=-1000, remote_stride=10)],
    "touching": [Run(local_offset=1, remote_offset=2, length=10, count=99, local_stride=10, remote_stride=10)],
    "neighbours": [Run(local_offset=100 * i, remote_offset=5 + 100 * i, length=100) for i in range(50)],
    "thousands, regular": [Run(local_offset=200 * i, remote_offset=130 * i, length=100) for i in range(5000)],
    "thousands, irregular": [
        Run(local_offset=(i * 7919) % 900_000, remote_offset=128 * i, length=1 + i % 128) for i in range(5000)
    ],
    "thousands, long pieces": [
        Run(local_offset=(i * 7919) % 900_000, remote_offset=9000 * i, length=8999) for i in range(100)
    ],
    "many of every kind": [
        *(Run(local_offset=64 * i, remote_offset=128 * i, length=64) for i in range(40)),
        *(Run(local_offset=64 * i, remote_offset=8192 + 64 * i, length=64) for i in range(40)),
        Run(local_offset=LENGTH, remote_offset=0, length=0),
        Run(local_offset=9, remote_offset=20_000, length=5, count=100, local_stride=6, remote_stride=7),
        *(
            Run(local_offset=(i * 7919) % 900_000, remote_offset=30_000 + 500 * i, length=100 * (1 + i % 3))
            for i in range(200)
        ),
        *(Run(local_offset=300 * i, remote_offset=200_000 + 300 * i, length=100) for i in range(3)),
        Run(local_offset=5, remote_offset=400_000, length=0, count=9),
    ],
    "regular, then not": [
        *(Run(local_offset=64 * i, remote_offset=128 * i, length=64) for i in range(10)),
        Run(local_offset=0, remote_offset=1280, length=63),
        Run(local_offset=64, remote_offset=1408, length=64),
        Run(local_offset=64, remote_offset=1600, length=64, count=2, local_stride=64, remote_stride=128),
    ],
}


@pytest.mark.parametrize("runs", RUN_CASES.values(), ids=RUN_CASES.keys())
def test_a_write_moves_exactly_the_bytes_of_its_runs(bench: Bench, runs: list[Run]) -> None:
    """Every byte of the runs arrives, no other byte changes, and the result counts them."""
    result = bench.write(runs)
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in runs))
    assert bytes(bench.target.data) == expected_after(bytes(bench.source.data), runs, bytes([POISON]) * LENGTH)


@pytest.mark.parametrize("runs", RUN_CASES.values(), ids=RUN_CASES.keys())
def test_a_read_moves_exactly_the_bytes_of_its_runs(bench: Bench, runs: list[Run]) -> None:
    """The same for a pull: local is the reader's side."""
    bench.source.open_grant(GRANT)
    remote = bench.owner.connect(bench.source.descriptor, soon())
    turned = [
        Run(
            local_offset=run.remote_offset,
            remote_offset=run.local_offset,
            length=run.length,
            count=run.count,
            local_stride=run.remote_stride,
            remote_stride=run.local_stride,
        )
        for run in runs
    ]
    result = remote.read(turned, bench.target, GRANT, soon())
    assert result == TransferResult(outcome=Outcome.DONE, nbytes=sum(run.nbytes for run in runs))
    assert bytes(bench.target.data) == expected_after(bytes(bench.source.data), runs, bytes([POISON]) * LENGTH)


def test_two_sources_fill_one_destination(bench: Bench) -> None:
    """Two ranks push interleaved shards at the same time under one grant: every byte is in place."""
    second = bench.plane("second")
    other = second.allocate(LENGTH, NUM_CELLS)
    other.data[:] = bytes([0x22]) * LENGTH
    bench.source.data[:] = bytes([0x11]) * LENGTH
    remote = second.connect(bench.target.descriptor, soon())
    piece, count = 512, LENGTH // 1024
    first_runs = [
        Run(local_offset=0, remote_offset=0, length=piece, count=count, local_stride=piece, remote_stride=2 * piece)
    ]
    second_runs = [Run(local_offset=piece * i, remote_offset=piece + 2 * piece * i, length=piece) for i in range(count)]
    futures = [
        bench.pool.submit(bench.remote.write, first_runs, bench.source, GRANT, soon()),
        bench.pool.submit(remote.write, second_runs, other, GRANT, soon()),
    ]
    assert [future.result(PATIENCE_S).outcome for future in futures] == [Outcome.DONE] * 2
    assert bytes(bench.target.data) == (b"\x11" * piece + b"\x22" * piece) * count
