"""What a worker can be told: the settings that all three roles share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from common.runtime.settings import LogLevel, SettingsError, SettingsProblem
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.ids import check_token
from contracts.rank import CollectivesKind
from contracts.workers import MAX_REPLICAS

Count = Annotated[int, msgspec.Meta(ge=1)]
Replicas = Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class EngineKind(StrEnum):
    """What computes: rank processes, or nothing real (to look at the control plane alone)."""

    RANKS = "ranks"
    FAKE = "fake"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a prefill, decode or mixed worker.

    It has `dp` replicas of `tp` ranks each; all other numbers are of one replica. `num_blocks` and `num_slots` are its
    cache: blocks of `block_size` tokens, and sequences at once. A step computes at
    most `max_step_tokens` tokens, of one prompt at most `prefill_chunk_tokens`; `mix_batch` lets prompts and decoding
    share a step. At most `max_waiting` sequences wait for memory; a reservation on a decode worker does so for `reserve_wait_s`. A release waits `release_timeout_ms` for writers under way, with the engine's steps held up meanwhile;
    memory whose writers take longer is quarantined. `transport` moves cache bytes: shared memory, whose sockets lie in
    `transport_dir`, or TCP, where each rank listens at a free port of `transport_host` and tells its peers to come to
    `transport_advertise_host` ("": the same). `failpoints` plants faults on purpose (see `common.dataplane.failpoints`).
    """

    worker_id: str
    model: Path
    served_model_name: str = ""
    nats_url: str = "nats://127.0.0.1:4222"
    engine: EngineKind = EngineKind.RANKS
    device: str = "cpu"
    dtype: str = "float32"
    tp: Count = 1
    dp: Replicas = 1
    block_size: Count = 16
    num_blocks: Count = 2048
    num_slots: Count = 32
    max_step_tokens: Count = 512
    prefill_chunk_tokens: Count = 256
    mix_batch: bool = True
    max_waiting: Count = 256
    reserve_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 4.0
    prompt_buffer_tokens: Count = 1 << 20
    collectives: CollectivesKind = CollectivesKind.SHARED_MEMORY
    collective_timeout_ms: Count = 30_000
    transport: Transport = Transport.SHM
    transport_dir: Path = Path("/tmp/pdmesh")  # noqa: S108 - the folder is made with mode 0700, and holds sockets only
    transport_host: str = "127.0.0.1"
    transport_advertise_host: str = ""
    failpoints: str = ""
    release_timeout_ms: Count = 100
    deadline_grace_s: Seconds = 5.0
    drain_timeout_s: Seconds = 30.0
    log_level: LogLevel = "info"
    admin_port: Port = 0

    def __post_init__(self) -> None:
        problems = []
        try:
            check_token("worker_id", self.worker_id)
        except InvalidValueError as error:
            problems.append(SettingsProblem(key="worker_id", value=self.worker_id, rule=error.rule_text))
        if self.max_step_tokens < self.num_slots:
            rule = f"at least num_slots = {self.num_slots}: every decoding sequence has a token in every step"
            problems.append(SettingsProblem(key="max_step_tokens", value=str(self.max_step_tokens), rule=rule))
        if self.dtype not in {"float32", "bfloat16"}:
            problems.append(SettingsProblem(key="dtype", value=self.dtype, rule="float32 or bfloat16"))
        if self.transport is Transport.TCP:
            problems += _tcp_problems(self.transport_host, self.transport_advertise_host)
        if problems:
            raise SettingsError(problems)

    @property
    def model_name(self) -> str:
        """The name under which clients know the model."""
        return self.served_model_name or self.model.resolve().name


def _tcp_problems(host: str, advertised: str) -> list[SettingsProblem]:
    """An empty address, or one that is only good for listening."""
    if not host:
        rule = "a name or an address of this host; 0.0.0.0 for all of them"
        return [SettingsProblem(key="transport_host", value=host, rule=rule)]
    if (advertised or host) in {"0.0.0.0", "::"}:
        rule = f"what peers can reach, when transport_host is {host}"
        return [SettingsProblem(key="transport_advertise_host", value=advertised, rule=rule)]
    return []
