"""What the commands are told, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from common.dataplane.failpoints import parse_failpoints
from contracts.errors import InvalidValueError
from loadtest.mesh import MeshSpec
from loadtest.recall import NUM_KEYS

PD_MODE = "P/D"


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `handoff` and `contract` are told.

    `vocab_size` 0 is the checkpoint's. `num_requests` are sent in each round for each prompt length and mode. `safety_requests` are sent two at once after
    the rounds; 0 leaves that run out. `push_repeats` 0 leaves the measurement of the data plane out.
    """

    model: Path
    prompt_tokens: tuple[int, ...]
    num_output_tokens: int
    vocab_size: int
    num_requests: int
    num_rounds: int
    num_warm_ups: int
    concurrency: int
    safety_requests: int
    prefill: str
    decode: str
    mixed: tuple[str, ...]
    overrides: tuple[str, ...]
    push_repeats: int
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        if not self.prompt_tokens:
            raise InvalidValueError(field="prompt_tokens", value=self.prompt_tokens, rule="at least one length")
        for length in self.prompt_tokens:
            check_least("prompt_tokens", length, 1)
        if len(set(self.prompt_tokens)) != len(self.prompt_tokens):
            raise InvalidValueError(field="prompt_tokens", value=self.prompt_tokens, rule="each length once")
        if len(set(self.mixed)) != len(self.mixed):
            raise InvalidValueError(field="mixed", value=self.mixed, rule="each SPEC once")
        # A token that ends a request at once is sent by prefill, and nothing is handed over.
        check_least("output_tokens", self.num_output_tokens, 2)
        for name in ("num_requests", "num_rounds", "concurrency"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        for name in ("vocab_size", "num_warm_ups", "safety_requests", "push_repeats"):
            check_least(name.removeprefix("num_"), getattr(self, name), 0)
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))

    @property
    def disaggregated(self) -> MeshSpec:
        """The mesh under test."""
        workers = (("prefill", self.prefill), ("decode", self.decode))
        return MeshSpec(mode=PD_MODE, model=self.model, workers=workers, overrides=self.overrides)

    @property
    def meshes(self) -> tuple[MeshSpec, ...]:
        """The mesh under test, and those that it is compared with."""
        mixed = tuple(
            MeshSpec(
                mode=f"mixed {spec}".strip(), model=self.model, workers=(("mixed", spec),), overrides=self.overrides
            )
            for spec in self.mixed
        )
        return (self.disaggregated, *mixed)


class RecallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `recall` is told. With `url` nothing is started; with `fault` a second mesh has it planted in its prefill worker."""

    model: Path
    url: str
    fault: str
    prefill: str
    decode: str
    overrides: tuple[str, ...]
    num_tasks: int
    num_pairs: int
    num_questions: int
    num_rounds: int
    concurrency: int
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        if not self.url:
            check_model(self.model)
        elif self.fault:
            raise InvalidValueError(field="fault", value=self.fault, rule="not with --url: the mesh is somebody else's")
        parse_failpoints(self.fault)
        for name in ("num_tasks", "num_questions", "num_rounds", "concurrency"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        if self.num_tasks % self.num_rounds:
            raise InvalidValueError(
                field="tasks", value=self.num_tasks, rule=f"a multiple of rounds ({self.num_rounds})"
            )
        check_least("pairs", self.num_pairs, self.num_questions)
        if self.num_pairs > NUM_KEYS:
            raise InvalidValueError(
                field="pairs", value=self.num_pairs, rule=f"at most {NUM_KEYS}, the keys that there are"
            )
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))


def check_model(model: Path) -> None:
    """Raise `InvalidValueError` unless there is a checkpoint."""
    if not (model / "config.json").is_file():
        raise InvalidValueError(field="model", value=str(model), rule="a folder with a checkpoint's config.json")


def check_least(field: str, value: int, least: int) -> None:
    """Raise `InvalidValueError` for a number that is too small."""
    if value < least:
        raise InvalidValueError(field=field, value=value, rule=f"{least} or more")


def check_above_zero(field: str, value: float) -> None:
    """Raise `InvalidValueError` for zero and below, and for what is no number."""
    if not 0 < value < float("inf"):
        raise InvalidValueError(field=field, value=value, rule="above 0 and finite")


def plain(settings: msgspec.Struct) -> dict[str, Any]:
    """The settings for a report."""
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
