"""What a rank of `dcp` tells of its work. No torch."""

from __future__ import annotations

import msgspec


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of how many. With `meeting_ns` the others are simulated, and that is how long ranks take to meet."""

    rank: int
    tp: int
    meeting_ns: int | None = None


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step of a rank, in ns, and what of it was spent in how many collectives."""

    step_ns: int
    collective_ns: int
    num_collectives: int


class ReadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of all layers alone, beside one plain pass over as many bytes of the same memory. In ns."""

    attention_ns: int
    read_ns: int
    num_bytes: int
