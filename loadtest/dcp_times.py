"""What a rank of `dcp` tells of its work. No torch."""

from __future__ import annotations

import msgspec


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of how many. With `meeting_ns` the others are simulated, and that is how long ranks take to meet."""

    rank: int
    tp: int
    meeting_ns: int | None = None


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step of a rank, in ns, and what of it was spent in how many collectives.

    `_cpu_ns` is what of it the rank's thread was at work: without waiting for others, and without other work on its core.
    """

    step_ns: int
    step_cpu_ns: int
    collective_ns: int
    collective_cpu_ns: int
    num_collectives: int


class ReadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of all layers alone, beside one plain pass over as many bytes of the same memory. Processor time, in ns."""

    attention_cpu_ns: int
    read_cpu_ns: int
    num_bytes: int
