"""What a worker says of itself: its record in `PD_WORKERS`, and the description that a peer asks for when they meet."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from contracts.codec import Versioned
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorInfo
from contracts.ids import Token
from contracts.manifest import RankManifest
from contracts.numbers import Whole


class WorkerRole(StrEnum):
    """What a worker does. The value is its token in subjects."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class SettingEventName(StrEnum):
    """What happened to a setting, in the past tense; the last token of its subject."""

    SETTING_CHANGED = "setting_changed"


class WorkerState(StrEnum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"


MAX_AUTHOR_CHARS: Final = 128
"""How much of who asks for a change is kept."""

MAX_REPLICAS: Final = 64
"""Replicas that one worker may have."""


class ReplicaRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has left for new sequences. A sequence lives in one replica: it needs all of its blocks and its slot there.

    `num_kept_blocks` are free too, but kept for answers that grow.
    """

    num_free_blocks: Whole
    num_free_slots: Whole
    num_kept_blocks: Whole = 0


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has left for new sequences and what it is doing, summed over its replicas.

    `num_kept_blocks` are free too, but kept for answers that grow. `replicas` says what each of several has left, in the order of
    their dp rank; a worker that has only one leaves it out.
    """

    num_free_blocks: Whole
    num_free_slots: Whole
    num_waiting: Whole
    num_running: Whole
    num_kept_blocks: Whole = 0
    replicas: Annotated[tuple[ReplicaRoom, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()

    def has_room(self, num_tokens: int, *, block_tokens: int) -> bool:
        """Whether some replica has a slot, and blocks of `block_tokens` tokens for a sequence of `num_tokens`, now."""
        rooms = self.replicas or (self,)
        return any(room.num_free_blocks * block_tokens >= num_tokens and room.num_free_slots > 0 for room in rooms)


class WorkerRecord(Versioned, frozen=True, kw_only=True, tag="worker_record"):
    """A worker's key in `PD_WORKERS`, put every 2 s; the bucket's time to live removes a dead worker's.

    It has `dp` replicas of `tp` ranks each. `num_blocks`, `num_slots` and `load` are sums over the replicas;
    `max_sequence_tokens` is what one replica can hold, because a sequence lives in one, and messages can name. Each `dcp` ranks share the blocks of a
    sequence, so that a block id stands for `dcp` blocks of `block_size` tokens. `max_prompt_tokens` is the longest prompt that a
    worker computes which takes none in pieces.
    """

    worker_id: Token
    incarnation: Token
    role: WorkerRole
    state: WorkerState
    model: str
    model_fingerprint: str
    tp: Whole
    dp: Whole
    dcp: Whole
    block_size: Whole
    num_blocks: Whole
    num_slots: Whole
    max_sequence_tokens: Whole
    max_prompt_tokens: Whole | None = None
    load: WorkerLoad

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that it can compute, or hold."""
        held = self.max_sequence_tokens
        return held if self.max_prompt_tokens is None else min(held, self.max_prompt_tokens)


class DescribeWorker(Versioned, frozen=True, kw_only=True, tag="describe_worker"):
    """Ask one rank of a worker for its layout and its region (verb `describe`): one rank a message, to stay small.

    Rank `dp_rank * tp + tp_rank` is rank `tp_rank` of replica `dp_rank`.
    """

    rank: int


class WorkerDescription(Versioned, frozen=True, kw_only=True, tag="worker_description"):
    """What a peer needs in order to plan against a rank and to write to it. `num_ranks` counts the ranks of all replicas."""

    worker_id: str
    incarnation: str
    num_ranks: Whole
    manifest: RankManifest
    region: RegionDescriptor | None


class DescribeRefused(Versioned, frozen=True, kw_only=True, tag="describe_refused"):
    """The worker cannot describe itself: no such rank."""

    error: ErrorInfo


class SetWorker(Versioned, frozen=True, kw_only=True, tag="set_worker"):
    """An operator to a worker: change a setting that may change while it runs (verb `set`). `value` as on a command line.

    `by` is who asks, by its own word.
    """

    key: str
    value: str
    by: Annotated[str, msgspec.Meta(max_length=MAX_AUTHOR_CHARS)] = ""


class SettingChanged(Versioned, frozen=True, kw_only=True, tag="setting_changed"):
    """It holds from now on."""

    worker_id: Token
    key: str
    before: str
    value: str


class SettingEvent(Versioned, frozen=True, kw_only=True, tag="setting_event", omit_defaults=True):
    """A setting of a worker was changed while it ran, on `PD_EVENTS`. `at` and `at_ns` are as in `HandoffEvent`.

    `by` is who asked for it, by its own word: nobody has checked it.
    """

    event: SettingEventName
    service: str
    instance: str
    incarnation: Token
    at: str
    at_ns: int
    key: str
    before: str
    value: str
    by: str = ""


class SetRefused(Versioned, frozen=True, kw_only=True, tag="set_refused"):
    """Nothing was changed: an unknown setting, one that needs a restart, or a value that breaks its rule."""

    error: ErrorInfo


class ScanWorker(Versioned, frozen=True, kw_only=True, tag="scan_worker"):
    """Ask a worker to look at what it really holds (verb `scan`): block tables and kernel objects, not its counters."""


class WorkerScan(Versioned, frozen=True, kw_only=True, tag="worker_scan"):
    """What a worker holds, found by walking its tables and `/proc`.

    `rank_sequences` are those bound on each rank, replica after replica. Blocks and slots are those that any sequence or
    grant names; those of replica r are numbered from `r * num_blocks` and `r * num_slots` of one replica on. `num_kept_blocks`
    of all replicas are held by nobody, but kept for answers that grow.
    """

    worker_id: str
    incarnation: str
    handoff_ids: tuple[str, ...]
    rank_sequences: tuple[tuple[int, ...], ...]
    held_blocks: tuple[int, ...]
    held_slots: tuple[int, ...]
    num_prompt_buffers: int
    num_open_fds: int
    num_memfds: int
    num_children: int
    num_tasks: int
    num_prefilled_tokens: int
    num_kept_blocks: int = 0
