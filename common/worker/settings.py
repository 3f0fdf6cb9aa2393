"""What a worker can be told: the settings that all three roles share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from common.dataplane.failpoints import parse_failpoints
from common.runtime.setting_types import Count, LogLevel, NatsReplicas, Port, Seconds
from common.runtime.settings import SettingsError, SettingsProblem
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.ids import check_token
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.rank import CollectivesKind, DrafterKind
from contracts.workers import MAX_REPLICAS, WorkerRole

_STATES: Final = (Role.CONV, Role.SSM)
DEFAULT_TRANSPORT_HOST: Final = "127.0.0.1"
MAX_STAGING_ROWS: Final = 1 << 16
MAX_SPECULATIVE_TOKENS: Final = 8
ARRIVAL: Final = "arrival"
MTP: Final = "mtp"
Replicas = Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]


class EngineKind(StrEnum):
    """What computes: rank processes, or nothing real (to look at the control plane alone)."""

    RANKS = "ranks"
    FAKE = "fake"


class PulledRoles(StrEnum):
    """What a decode worker that pulls reads itself: the recurrent states, or all of a request's cache, with that of a draft head."""

    STATES = "states"
    ALL = "all"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the caches; the others are pushed."""
        return _STATES if self is PulledRoles.STATES else tuple(Role)


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a prefill, decode or mixed worker: of one replica, but for `dp`, which says how many there are.

    What may be combined with what, in which role, says `common.worker.core.compatibility`.
    """

    worker_id: str
    """Its name in records, subjects and logs; no two workers of a mesh have the same."""
    model: Path
    """Folder of the checkpoint."""
    served_model_name: str = ""
    """Name under which clients know the model; empty: the folder's."""
    nats_url: str = "nats://127.0.0.1:4222"
    """Where NATS is."""
    nats_replicas: NatsReplicas = 1
    """Servers of a NATS cluster that keep each bucket and stream, alike for all services; with several, leases last half as long again."""
    engine: EngineKind = EngineKind.RANKS
    """What computes: ranks, or fake ones that compute nothing, to look at the control plane alone."""
    device: str = "cpu"
    """What ranks compute on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the checkpoint is widened to; alike on both workers of a pair."""
    tp: Count = 1
    """Ranks of a replica; must divide the model's heads."""
    dp: Replicas = 1
    """Replicas of those ranks, each with a cache of its own; the least loaded one takes a request."""
    dcp: Count = 1
    """Decode and mixed: ranks in succession that share the KV blocks of a sequence; must divide the ranks that hold one KV head."""
    dcp_interleave: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens in succession that lie on one of those ranks; 0: block_size, and no other number is possible yet."""
    layerwise_kv_sharding: bool = False
    """Whether layers of the KV cache lie on different ranks; not possible yet."""
    block_size: Count = 16
    """Tokens that one block of the cache holds; alike on both workers of a pair."""
    num_blocks: Count = 2048
    """Blocks of the cache of each rank of a replica; with dcp each of them holds its share of a sequence."""
    num_slots: Count = 32
    """Sequences that a replica holds at once: each has one slot of recurrent state."""
    max_step_tokens: Count = 512
    """Tokens that one step computes at most; at least num_slots."""
    prefill_chunk_tokens: Count = 256
    """Tokens of one prompt that one step computes at most."""
    chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps; without it prompts longer than max_step_tokens are refused."""
    experimental_dcp_chunked_prefill: bool = False
    """Mixed: allows chunked_prefill with dcp, whose answers may differ in bits from those of dcp=1."""
    mix_batch: bool = True
    """Whether prompts and decoding share steps; with dcp they never do."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_SPECULATIVE_TOKENS)] = 0
    """Tokens guessed for each sequence and verified in one step, 0 to 8; prefill guesses none, but keeps the draft head's cache for those who do."""
    drafter: Literal["mtp", "ngram"] = "mtp"
    """Who guesses, with num_speculative_tokens: the checkpoint's draft head, or a look-up of what stood before in the same text."""
    mtp_draft_body_tp1: bool = False
    """With drafter=mtp: whether each rank computes the draft head's layer whole and keeps its whole cache, instead of its share."""
    graph: bool = False
    """Whether steps are captured once and replayed; not possible yet."""
    graph_double_buffer: bool = False
    """Whether captured steps have two sets of buffers; never possible."""
    decode_no_padding: bool = False
    """Whether captured steps are replayed without padding; not possible yet: steps that are not captured have none."""
    prefix_cache: bool = False
    """Whether the cache of a prompt is kept for those that begin alike; not possible yet."""
    schedule_overlap: bool = False
    """Whether a step is planned while the one before is computed; not possible yet."""
    priority_strategy: str = ARRIVAL
    """By what requests go first; nothing but arrival is possible yet."""
    max_waiting: Count = 256
    """Sequences that may wait for memory; one more is refused."""
    reserve_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 4.0
    """How long a reservation on a decode worker waits for memory before it is refused."""
    reserve_output_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Decode and mixed: tokens of an answer that memory is set aside for at first; it grows, and the youngest gives way; 0: all."""
    prompt_buffer_tokens: Count = 1 << 20
    """Tokens of prompts that may be kept until somebody asks to run them."""
    collectives: CollectivesKind = CollectivesKind.SHARED_MEMORY
    """How the ranks of a replica add up: over shared memory, or over gloo."""
    collective_timeout_ms: Count = 30_000
    """How long a rank waits for the others before it counts them as lost."""
    transport: Transport = Transport.SHM
    """How cache bytes move: shared memory of one host, or TCP; alike on both workers of a pair."""
    transport_dir: Path = Path("/tmp/pdmesh")  # noqa: S108 - the folder is made with mode 0700, and holds sockets only
    """Shared memory: folder of the sockets at which peers ask for it."""
    transport_host: str = DEFAULT_TRANSPORT_HOST
    """TCP: address at which each rank listens, at a free port."""
    transport_advertise_host: str = ""
    """TCP: where peers are told to come; empty: transport_host. Needed with 0.0.0.0."""
    transfer: Transfer = Transfer.PUSH
    """Decode: who moves a request's cache. push: prefill writes it, pull: this worker reads what `pull` says, and prefill writes the rest."""
    pull: PulledRoles = PulledRoles.STATES
    """Decode, with transfer=pull: what is read, the recurrent states or all of the cache."""
    parallel_shard_pull: bool = True
    """Decode, with transfer=pull: whether the ranks of a prefill worker are read side by side; may be changed while it runs."""
    num_staging_rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGING_ROWS)] = 0
    """Decode, with transfer=pull: requests that may be pulled at once, each with a row of memory of its own; 0: num_slots."""
    verify_cache: bool = False
    """Decode: whether every byte of a request's cache is held against what prefill computed, before the first step; it costs a pass over both."""
    failpoints: str = ""
    """Faults to plant on purpose; the grammar is in common/dataplane/failpoints.py."""
    release_timeout_ms: Count = 100
    """How long a release waits for writers under way, with steps held up; then the memory is quarantined."""
    deadline_grace_s: Seconds = 5.0
    """How long after its deadline a handoff that nobody has released is ended here."""
    drain_timeout_s: Seconds = 30.0
    """How long a drain waits for what is under way before it is cut short."""
    log_level: LogLevel = "info"
    """Lines below it are left out of the log."""
    admin_host: str = "127.0.0.1"
    """Address on which /health, /ready and /metrics are served, to whoever reaches it."""
    admin_port: Port = 0
    """Their port; 0: a free one, named in the log."""

    def __post_init__(self) -> None:
        problems = []
        try:
            check_token("worker_id", self.worker_id)
        except InvalidValueError as error:
            problems.append(SettingsProblem(key="worker_id", value=self.worker_id, rule=error.rule_text))
        try:
            parse_failpoints(self.failpoints)
        except InvalidValueError as error:
            problems.append(SettingsProblem(key="failpoints", value=str(error.value), rule=error.rule_text))
        if problems:
            raise SettingsError(problems)

    @property
    def model_name(self) -> str:
        """The name under which clients know the model."""
        return self.served_model_name or self.model.resolve().name

    @property
    def pulled(self) -> tuple[Role, ...]:
        """The roles that a decode worker reads itself."""
        return self.pull.roles if self.transfer is Transfer.PULL else ()

    def drafter_of(self, role: WorkerRole) -> DrafterKind:
        """Who guesses on a worker of this role. A prefill worker guesses nothing: it has the draft head alone, for its cache."""
        if not self.num_speculative_tokens or (role is WorkerRole.PREFILL and self.drafter != MTP):
            return DrafterKind.NONE
        return DrafterKind(self.drafter)

    def depth_of(self, role: WorkerRole) -> int:
        """Tokens that a worker of this role guesses at most for a sequence; its states have so many rows more than one."""
        return 0 if role is WorkerRole.PREFILL else self.num_speculative_tokens

    def staging_rows_of(self, role: WorkerRole) -> int:
        """Staging rows of each rank of a worker of this role."""
        pulls = role is WorkerRole.DECODE and self.transfer is Transfer.PULL
        return (self.num_staging_rows or self.num_slots) if pulls else 0
