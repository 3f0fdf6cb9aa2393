"""How long the layers of one prompt took on each rank, summed over all of its chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.engine.port import StepResult


class LayerTime(msgspec.Struct, kw_only=True):
    """One layer on one rank: busy for `busy_ns` in `num_chunks` steps, of which the last ran from `started_ns` to `ended_ns`.

    A step is shared by all that it computes: its time is counted in full for each of them.
    """

    rank: int
    layer: int
    busy_ns: int = 0
    num_chunks: int = 0
    started_ns: int = 0
    ended_ns: int = 0


class LayerTimes:
    """The layers of one prompt. A step that had nothing to push tells no times: its chunk is missing here."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], LayerTime] = {}

    def __iter__(self) -> Iterator[LayerTime]:
        return iter(self._times.values())

    def add(self, result: StepResult) -> None:
        """Add a step that the prompt took part in."""
        for rank, started in enumerate(result.layer_started_ns):
            ends = (*started[1:], result.ended_ns)
            for layer, (start_ns, end_ns) in enumerate(zip(started, ends, strict=False)):
                time = self._times.setdefault((rank, layer), LayerTime(rank=rank, layer=layer))
                time.busy_ns += end_ns - start_ns
                time.num_chunks += 1
                time.started_ns, time.ended_ns = start_ns, end_ns
