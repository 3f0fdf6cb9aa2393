"""What the commands are told, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from common.dataplane.failpoints import parse_failpoints
from common.worker.settings import PulledRoles
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from loadtest.dcp_settings import DcpSettings
from loadtest.mesh import MeshSpec
from loadtest.recall import NUM_KEYS
from loadtest.setting_rules import check_above_zero, check_least, check_lengths, check_model
from loadtest.speculate_settings import SpeculateSettings

PD_MODE = "P/D"
SHORT_MEMORY = ("router.request_timeout_s=15", "broker.keep_ended_s=10")
"""What is remembered on purpose of requests that are over is kept until their deadlines, and some time: with these settings it
reaches its level while a mesh is warmed up, and does not pass for growth."""


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
        check_lengths(self.prompt_tokens)
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


class DataPlaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `dataplane` is told. `sizes` and `pieces` in bytes; the cases in pieces move `piece_case_bytes` each, a multiple of them.

    `region_bytes` is the memory that transfers are rotated through, at each end of each way. `block_bytes` bounds what one way moves
    in its part of a round.
    """

    sizes: tuple[int, ...]
    pieces: tuple[int, ...]
    num_sources: tuple[int, ...]
    region_bytes: int
    block_bytes: int
    num_rounds: int
    time_limit_s: float
    piece_case_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_least("rounds", self.num_rounds, 1)
        check_least("block", self.block_bytes, 1)
        check_above_zero("time_limit_s", self.time_limit_s)
        for each in self.num_sources:
            check_least("sources", each, 1)
        for name in ("sizes", "pieces", "num_sources"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise InvalidValueError(field=name.removeprefix("num_"), value=values, rule="each once")
        for nbytes in self.sizes:
            check_least("sizes", nbytes, 1)
            if nbytes > self.region_bytes:
                raise InvalidValueError(field="sizes", value=nbytes, rule=f"at most the region ({self.region_bytes})")
        for nbytes in self.pieces:
            if nbytes < 8 or self.piece_case_bytes % nbytes:
                rule = f"a divisor of {self.piece_case_bytes}, 8 or more"
                raise InvalidValueError(field="pieces", value=nbytes, rule=rule)
        if self.pieces and self.region_bytes < 2 * self.piece_case_bytes:
            rule = f"at least {2 * self.piece_case_bytes} for cases in pieces"
            raise InvalidValueError(field="region", value=self.region_bytes, rule=rule)


class OverlapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `overlap` is told: `num_requests` prompts of each length in each round, one at a time."""

    model: Path
    prompt_tokens: tuple[int, ...]
    vocab_size: int
    num_requests: int
    num_rounds: int
    num_warm_ups: int
    prefill: str
    decode: str
    overrides: tuple[str, ...]
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        check_lengths(self.prompt_tokens)
        for name in ("num_requests", "num_rounds"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        for name in ("vocab_size", "num_warm_ups"):
            check_least(name.removeprefix("num_"), getattr(self, name), 0)
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))

    @property
    def mesh(self) -> MeshSpec:
        """The mesh under test."""
        workers = (("prefill", self.prefill), ("decode", self.decode))
        return MeshSpec(mode=PD_MODE, model=self.model, workers=workers, overrides=self.overrides)


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `memory` is told.

    After `num_warm_ups` requests, and as many more as `warm_up_s` seconds take, come `num_requests`, `concurrency` at once, with a
    look at each process after every `sample_every`. Each of `transports` has a mesh of its own.
    """

    model: Path
    transports: tuple[str, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    num_requests: int
    num_warm_ups: int
    warm_up_s: float
    sample_every: int
    concurrency: int
    prefill: str
    decode: str
    overrides: tuple[str, ...]
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        for each in self.transports:
            if each not in set(Transport):
                raise InvalidValueError(field="transport", value=each, rule=f"one of {', '.join(Transport)}")
        if len(set(self.transports)) != len(self.transports):
            raise InvalidValueError(field="transport", value=self.transports, rule="each once")
        for name in ("num_prompt_tokens", "num_requests", "sample_every", "concurrency"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        check_least("output_tokens", self.num_output_tokens, 2)
        for name in ("vocab_size", "num_warm_ups"):
            check_least(name.removeprefix("num_"), getattr(self, name), 0)
        if self.num_requests % self.sample_every or self.num_requests < 2 * self.sample_every:
            rule = f"a multiple of sample_every ({self.sample_every}), twice that or more"
            raise InvalidValueError(field="requests", value=self.num_requests, rule=rule)
        for name in ("request_timeout_s", "time_limit_s", "warm_up_s"):
            check_above_zero(name, getattr(self, name))

    def mesh(self, transport: str) -> MeshSpec:
        """The mesh that moves its bytes by one transport."""
        return MeshSpec(
            mode=f"P/D over {transport}",
            model=self.model,
            workers=(("prefill", self.prefill), ("decode", self.decode)),
            overrides=(f"transport={transport}", *SHORT_MEMORY, *self.overrides),
        )


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `control` is told: `num_handoffs` at each number of them `in_flight`, through one broker with its settings `overrides`.

    `keep_ended_s` is for how long that broker remembers what has ended.
    """

    in_flight: tuple[int, ...]
    num_handoffs: int
    keep_ended_s: float
    overrides: tuple[str, ...]
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        if not self.in_flight or len(set(self.in_flight)) != len(self.in_flight):
            raise InvalidValueError(field="in_flight", value=self.in_flight, rule="one number or more, each once")
        for each in self.in_flight:
            check_least("in_flight", each, 1)
        check_least("handoffs", self.num_handoffs, max(self.in_flight))
        for override in self.overrides:
            if override.partition("=")[0] == "keep_ended_s":
                raise InvalidValueError(
                    field="set", value=override, rule="without keep_ended_s, which --keep-ended sets"
                )
        for name in ("request_timeout_s", "time_limit_s", "keep_ended_s"):
            check_above_zero(name, getattr(self, name))


class ShardPullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `shard-pull` is told: `num_requests` in each round for each mode and latency, for each SPEC in `prefill`.

    Without `latencies_ms` the latency is looked for at which waiting is a certain share of a restore; 0 among them adds none.
    `mb_per_s` 0 is no bound, `vocab_size` 0 the checkpoint's.
    """

    model: Path
    prefill: tuple[str, ...]
    decode: str
    pull: str
    latencies_ms: tuple[int, ...]
    mb_per_s: int
    num_prompt_tokens: int
    vocab_size: int
    num_requests: int
    num_rounds: int
    num_warm_ups: int
    overrides: tuple[str, ...]
    seed: int
    request_timeout_s: float
    time_limit_s: float

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` that names the first value that is not legal."""
        check_model(self.model)
        if not self.prefill or len(set(self.prefill)) != len(self.prefill):
            raise InvalidValueError(field="prefill", value=self.prefill, rule="one SPEC or more, each once")
        if self.pull not in set(PulledRoles):
            raise InvalidValueError(field="pull", value=self.pull, rule=f"one of {', '.join(PulledRoles)}")
        for latency_ms in self.latencies_ms:
            check_least("latency_ms", latency_ms, 0)
        if len(set(self.latencies_ms)) != len(self.latencies_ms):
            raise InvalidValueError(field="latency_ms", value=self.latencies_ms, rule="each once")
        check_least("mb_per_s", self.mb_per_s, 0)
        for name in ("num_prompt_tokens", "num_requests", "num_rounds"):
            check_least(name.removeprefix("num_"), getattr(self, name), 1)
        for name in ("vocab_size", "num_warm_ups"):
            check_least(name.removeprefix("num_"), getattr(self, name), 0)
        for name in ("request_timeout_s", "time_limit_s"):
            check_above_zero(name, getattr(self, name))


MeshSettings: TypeAlias = (
    LoadSettings
    | RecallSettings
    | OverlapSettings
    | MemorySettings
    | ControlSettings
    | ShardPullSettings
    | DcpSettings
    | SpeculateSettings
)
"""What a command is told that runs on an event loop."""
Settings: TypeAlias = MeshSettings | DataPlaneSettings
"""What any of the commands is told."""


def plain(settings: msgspec.Struct) -> dict[str, Any]:
    """The settings for a report."""
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
