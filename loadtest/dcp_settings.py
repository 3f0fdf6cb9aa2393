"""What `dcp` is told, checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

from contracts.errors import InvalidValueError
from loadtest.setting_rules import check_above_zero, check_least, check_model

MEASURED_RANKS = (2, 4, 8)
"""How many ranks `dcp` can have: of its model each has a query head at least."""


class DcpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `dcp` is told: `num_steps` decode steps in each round behind each of `contexts`, for each number of `ranks`.

    Each SPEC in `decode` gets a mesh with `num_blocks` blocks a rank, and `num_requests` of each length; 0 leaves meshes out.
    """

    model: Path
    contexts: tuple[int, ...]
    ranks: tuple[int, ...]
    num_steps: int
    num_rounds: int
    prefill: str
    decode: tuple[str, ...]
    num_blocks: int
    num_requests: int
    overrides: tuple[str, ...]
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        for name in ("contexts", "ranks", "decode"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InvalidValueError(field=name, value=values, rule="one or more, each once")
        for length in self.contexts:
            check_least("contexts", length, 1)
        if tuple(sorted(self.contexts)) != self.contexts:
            raise InvalidValueError(field="contexts", value=self.contexts, rule="from the shortest to the longest")
        for each in self.ranks:
            if each not in MEASURED_RANKS:
                rule = f"of {', '.join(map(str, MEASURED_RANKS))}, which the query heads can be cut into"
                raise InvalidValueError(field="ranks", value=each, rule=rule)
        for name in ("num_steps", "num_rounds", "num_blocks"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        check_least("requests", self.num_requests, 0)
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))
