"""What lies where in the cache region of one rank: the contract from which two workers plan their copies.

A manifest lists spans. A span says that this rank holds the logical interval `[start, start + length)` of a logical tensor
(`TensorKey`), and where that interval lies in the rank's one region. Offsets, strides and sizes are bytes; offsets count
from the start of the region's data (behind its header). Units of an interval:

- KEY, VALUE: KV heads
- CONV: channels of one of the three segments Q, K, V, each cut over the ranks on its own
- SSM: value heads
- BOOTSTRAP: the whole hidden state, one unit that every rank holds
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

MANIFEST_VERSION: Final = 2


class Namespace(StrEnum):
    """Whose cache it is: the model's own layers, or those of its draft (MTP) head."""

    TARGET = "target"
    DRAFT = "draft"

    @property
    def first_token(self) -> int:
        """The first token of a sequence that has a key: a draft keeps what belongs to a position one place behind it."""
        return 1 if self is Namespace.DRAFT else 0


class Role(StrEnum):
    """What a cache holds. KEY and VALUE are paged by block; CONV, SSM and BOOTSTRAP have one slot a sequence.

    BOOTSTRAP is the hidden state behind the last token of a prompt, which the draft head goes on from.
    """

    KEY = "key"
    VALUE = "value"
    CONV = "conv"
    SSM = "ssm"
    BOOTSTRAP = "bootstrap"

    @property
    def is_paged(self) -> bool:
        """Whether it is kept by block, and grows with the sequence; otherwise a sequence has one slot of it."""
        return self in {Role.KEY, Role.VALUE}


class Segment(StrEnum):
    """The part of a CONV row that is cut over the ranks on its own; WHOLE for every other role."""

    WHOLE = "whole"
    Q = "q"
    K = "k"
    V = "v"


class Dtype(StrEnum):
    """Element types that a cache may have, by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2


class CacheDtypes(msgspec.Struct, frozen=True, kw_only=True):
    """The element type of each role. SSM is float32 in every model; it is named so that a reader can check it.

    BOOTSTRAP has that of CONV: both are activations as the model computes them.
    """

    key: Dtype
    value: Dtype
    conv: Dtype
    ssm: Dtype = Dtype.FLOAT32

    def of(self, role: Role) -> Dtype:
        """The element type of one role."""
        match role:
            case Role.KEY:
                return self.key
            case Role.VALUE:
                return self.value
            case Role.CONV | Role.BOOTSTRAP:
                return self.conv
            case Role.SSM:
                return self.ssm


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Over how many ranks a worker spreads its caches. The dcp ranks are taken from the tp ranks: the world is dp * tp."""

    dp_size: int = 1
    tp_size: int = 1
    dcp_size: int = 1


class Coordinates(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one rank: data parallel, tensor parallel, and decode context parallel (`dcp_rank = tp_rank % dcp_size`)."""

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    @property
    def topology(self) -> Topology:
        """The sizes without the ranks: equal on all ranks of a worker."""
        return Topology(dp_size=self.dp_size, tp_size=self.tp_size, dcp_size=self.dcp_size)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers must agree on before they are linked. `topology` and `num_speculative_tokens` may differ: the planner bridges them.

    `model` identifies configuration and weights; equal strings mean that a cache of one can be continued by the other.
    `draft` identifies the draft head whose caches are kept beside the model's; empty without one. Where it differs, the
    draft's caches stay behind and the rest is handed over. `interleave` counts the tokens in
    succession that lie on one rank where several share a sequence.
    """

    model: str
    draft: str = ""
    block_size: int
    interleave: int
    dtypes: CacheDtypes
    num_speculative_tokens: int
    topology: Topology


class TensorKey(msgspec.Struct, frozen=True, kw_only=True, array_like=True, order=True):
    """One logical tensor, whole over all ranks. `layer` counts all layers of its namespace from 0."""

    namespace: Namespace
    role: Role
    layer: int
    segment: Segment = Segment.WHOLE

    @property
    def name(self) -> str:
        """How errors and logs call it."""
        return f"{self.namespace}/{self.role}/{self.layer}/{self.segment}"


class PagedPlace(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="paged"):
    """Where the KV heads of a span lie: block b, i-th head of the span at `offset + b * block_stride + i * head_bytes`.

    Inside one head of one block, the tokens follow each other, `token_bytes` each (`head_bytes = block_size * token_bytes`).
    """

    offset: int
    block_stride: int
    head_bytes: int
    token_bytes: int


class SlotPlace(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="slot"):
    """Where a span of a slot lies: slot s, row r, i-th unit at `offset + s * slot_stride + r * row_stride + i * unit_bytes`.

    A slot has `num_rows` rows (CONV 3 + k, SSM k + 1, with speculation depth k, BOOTSTRAP 1), of which a transfer moves `moved_rows`
    in succession (CONV 3, SSM 1, BOOTSTRAP 1): the row at which it starts is known only when a request is bound.
    """

    offset: int
    slot_stride: int
    row_stride: int
    num_rows: int
    moved_rows: int
    unit_bytes: int


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The logical interval `[start, start + length)` of `key` that this rank holds, and where it lies."""

    key: TensorKey
    start: int
    length: int
    place: PagedPlace | SlotPlace


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a planner needs to know about one rank.

    `num_blocks` and `num_slots` are counts of this rank; `region_bytes` is the size of the region's data, which every span
    must lie in. Where `dcp_size` ranks share a sequence, runs of `interleave` tokens alternate between them; rank r holds the runs
    whose number is r modulo `dcp_size`. A reader refuses a `schema_version` that it does not know.
    """

    schema_version: int = MANIFEST_VERSION
    worker_id: str
    incarnation: str
    coordinates: Coordinates
    model: str
    draft: str = ""
    block_size: int
    interleave: int
    dtypes: CacheDtypes
    num_blocks: int
    num_slots: int
    num_speculative_tokens: int
    region_bytes: int
    spans: tuple[Span, ...]

    @property
    def fingerprint(self) -> Fingerprint:
        """The part of this manifest that is compared when two workers are linked."""
        return Fingerprint(
            model=self.model,
            draft=self.draft,
            block_size=self.block_size,
            interleave=self.interleave,
            dtypes=self.dtypes,
            num_speculative_tokens=self.num_speculative_tokens,
            topology=self.coordinates.topology,
        )


class PlannedPart(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One line of a handoff's ledger: what `src_rank` owes to `dst_rank` for one cache. Ranks are tensor-parallel ranks.

    For KEY and VALUE the destination owns the blocks b of the sequence with `b % modulus == residue`.
    For CONV, SSM and BOOTSTRAP there is one unit, the slot.
    """

    namespace: Namespace
    role: Role
    layer: int
    src_rank: int
    dst_rank: int
    modulus: int = 1
    residue: int = 0
