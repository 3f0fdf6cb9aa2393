"""Compares a push through the data-plane port with a plain memcpy of as many bytes, in one run.

    python -m loadtest.dataplane_bench [--megabytes 16] [--rounds 41]

Both go over the same two shared regions, at positions that move on through 256 MiB so that caches do not flatter, and take turns,
so that a busy machine is equally busy for both. Time is that of the thread on its core, without what it waited for one. A batch is cut into pieces of one size, as a reshard from two ranks to one cuts
them: packed at the source, every second place at the destination. "regular" pieces follow each other (blocks in a row);
"shuffled" pieces do not (blocks as a worn allocator hands them out). Batches are bound before, as for all but the first layer of a chunk. Medians, in GB/s, and the ratio to memcpy.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from common.dataplane.port import Outcome, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.layout.joining import batch_of
from common.layout.run import Run
from common.layout.run_batch import RunBatch
from common.runtime.clock import SystemClock

REGION_BYTES: Final = 256 << 20
PIECE_BYTES: Final = (2048, 4096, 8192, 16384)
GRANT: Final = WriteGrant(lock_cell=0, cells=(0,), generation=1)


def pieces_of(nbytes: int, piece: int, start: int, *, shuffled: bool) -> list[Run]:
    """One batch: `nbytes` in pieces (0: in one), from `start` on at both sides."""
    if not piece:
        return [Run(local_offset=start, remote_offset=start, length=nbytes)]
    count = nbytes // piece
    if not shuffled:
        strides = {"local_stride": piece, "remote_stride": 2 * piece}
        return [Run(local_offset=start, remote_offset=start, length=piece, count=count, **strides)]
    order = list(range(count))
    random.Random(piece).shuffle(order)
    return [
        Run(local_offset=start + piece * place, remote_offset=start + 2 * piece * target, length=piece)
        for place, target in enumerate(order)
    ]


def median_rates(nbytes: int, actions: Sequence[Callable[[int], None]], num_rounds: int) -> list[float]:
    """GB/s of each action, run in turns; each is given a position that moves on by two batches a round."""
    durations: list[list[float]] = [[] for _ in actions]
    for turn in range(num_rounds):
        for index, action in enumerate(actions):
            start = (turn * len(actions) + index) * 2 * nbytes % (REGION_BYTES - 2 * nbytes)
            begin = time.thread_time()
            action(start)
            durations[index].append(time.thread_time() - begin)
    return [nbytes / statistics.median(column) / 1e9 for column in durations]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Push through the data-plane port against memcpy.")
    parser.add_argument("--megabytes", type=int, default=16, help="size of a batch in MiB, 1 to 64")
    parser.add_argument("--rounds", type=int, default=41, help="batches of each kind")
    options = parser.parse_args()
    if not 1 <= options.megabytes <= 64 or options.rounds < 1:
        parser.error("--megabytes is 1 to 64, --rounds at least 1")
    nbytes = options.megabytes << 20
    now = SystemClock().monotonic
    with tempfile.TemporaryDirectory() as folder:
        plane = ShmDataPlane(Path(folder), peer_id="bench", incarnation="i1", now=now)
        source, target = plane.allocate(REGION_BYTES, 1), plane.allocate(REGION_BYTES, 1)
        target.set_generations((0,), 1)
        remote = plane.connect(target.descriptor, now() + 60)
        from_address = ctypes.addressof(ctypes.c_char.from_buffer(source.data))
        to_address = ctypes.addressof(ctypes.c_char.from_buffer(target.data))

        def copy(start: int) -> None:
            ctypes.memmove(to_address + start, from_address + start, nbytes)

        def push(runs: Sequence[Run]) -> None:
            result = remote.write(runs, source, GRANT, now() + 60)
            if result.outcome is not Outcome.DONE:
                raise SystemExit(f"a push failed: {result.reason}")

        print(f"{'pieces':>18} {'memcpy GB/s':>12} {'push GB/s':>10} {'ratio':>6}")
        cases = [(0, False), *((piece, False) for piece in PIECE_BYTES), *((piece, True) for piece in PIECE_BYTES)]
        for piece, shuffled in cases:
            starts = {turn * 2 * nbytes % (REGION_BYTES - 2 * nbytes) for turn in range(2 * options.rounds)}
            batches = {start: batch_of(pieces_of(nbytes, piece, start, shuffled=shuffled)) for start in starts}

            def push_pieces(start: int, batches: dict[int, RunBatch] = batches) -> None:
                push(batches[start])

            plain, pushed = median_rates(nbytes, (copy, push_pieces), options.rounds)
            name = f"{piece // 1024} KiB {'shuffled' if shuffled else 'regular'}" if piece else "one"
            print(f"{name:>18} {plain:12.2f} {pushed:10.2f} {pushed / plain:6.2f}")
        plane.close()


if __name__ == "__main__":
    main()
