"""What `speculate` is told, checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.worker.settings import MAX_SPECULATIVE_TOKENS
from contracts.errors import InvalidValueError
from loadtest.setting_rules import check_above_zero, check_least, check_model

MAX_SPECULATE_BATCH = 8
MAX_SPECULATE_TOKENS = 400
MAX_TEMPERATURE = 2.0


class SpeculateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `speculate` is told: answers of `num_output_tokens` in each round, at each of `depths`, `batches` and `temperatures`.

    Meshes, one at each depth and one without guesses, get `num_requests` in each round, `batches` at once; 0 leaves them out.
    """

    model: Path
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_output_tokens: int
    num_passes: int
    num_rounds: int
    num_requests: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        for name, most in (("depths", MAX_SPECULATIVE_TOKENS), ("batches", MAX_SPECULATE_BATCH)):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values) or not all(1 <= value <= most for value in values):
                raise InvalidValueError(field=name, value=values, rule=f"one or more from 1 to {most}, each once")
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise InvalidValueError(field="temperatures", value=self.temperatures, rule="one or more, each once")
        for temperature in self.temperatures:
            if not 0 <= temperature <= MAX_TEMPERATURE:
                rule = f"0 to {MAX_TEMPERATURE:g}"
                raise InvalidValueError(field="temperatures", value=temperature, rule=rule)
        if not MAX_SPECULATIVE_TOKENS < self.num_output_tokens <= MAX_SPECULATE_TOKENS:
            rule = f"{MAX_SPECULATIVE_TOKENS + 1} to {MAX_SPECULATE_TOKENS}"
            raise InvalidValueError(field="output_tokens", value=self.num_output_tokens, rule=rule)
        for name in ("num_passes", "num_rounds"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        if self.num_requests and self.num_requests < max(self.batches):
            rule = (
                f"0, or at least as many as are to be under way at once ({max(self.batches)}, the largest of batches)"
            )
            raise InvalidValueError(field="requests", value=self.num_requests, rule=rule)
        check_least("requests", self.num_requests, 0)
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))
