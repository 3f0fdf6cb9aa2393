"""How one process tells another where its cache memory lies: the address of a data-plane region."""

from __future__ import annotations

import enum

import msgspec

DESCRIPTOR_VERSION = 1
"""Version of `RegionDescriptor` that this code writes; any other version is refused at connect."""


GENERATION_BITS = 48
"""Bits of a region's own generation, which its owner draws at random: JSON readers keep whole numbers of that size."""


class Transport(enum.StrEnum):
    """What moves the bytes between workers."""

    SHM = "shm"
    """Shared memory, between the processes of one host."""
    TCP = "tcp"
    """TCP, between hosts."""


class Asked(enum.StrEnum):
    """What a peer wants of a region."""

    CONNECT = "connect"
    """To reach it, or whatever a caller wants that has not said so yet."""
    WRITE = "write"
    READ = "read"


class RefusalReason(enum.StrEnum):
    """Why the owner of a region turns a peer away."""

    REGION = "region"
    """There is no such region of this start here."""
    CELLS = "cells"
    """The grant names cells that the region does not have."""
    STALE = "stale"
    """The grant's generation is not in its cells: it was taken back, or never given."""
    SECRET = "secret"  # noqa: S105 - the name of a reason
    """The generation is right, and the secret is not the one that the grant was opened with."""
    BOUNDS = "bounds"
    """Bytes outside the region."""
    REVOKED = "revoked"
    """The grant was good when the transfer began, and was taken back meanwhile."""
    MALFORMED = "malformed"
    """Bytes that no peer of ours sends."""


class Memory(enum.StrEnum):
    """Kind of memory that a region's data lies in."""

    HOST = "host"
    CUDA = "cuda"
    NPU = "npu"


class RegionDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Address of one region: enough for a peer to connect to it, never enough to write without a grant.

    `transport` names the adapter ("shm", "tcp", "fake"), `version` is `DESCRIPTOR_VERSION`. `peer_id` and `incarnation` name
    the owning process's worker and its start; `region_id` is unique within that incarnation. The data part begins `base`
    bytes into the transport's own object and has `length` bytes; every offset in manifests and runs counts from there.
    The header holds `num_cells` generation cells (u64). `generation` is the region's own: it differs when the owner
    replaces the memory under the same id. `device` is the device's name as its runtime spells it ("cpu", "npu:0").
    `opaque` is read by the transport alone: for "shm" the path of the socket that hands out the descriptor, for "tcp" `host:port`.
    """

    transport: str
    peer_id: str
    incarnation: str
    region_id: str
    base: int
    length: int
    num_cells: int
    opaque: str
    version: int = DESCRIPTOR_VERSION
    generation: int = 0
    memory: Memory = Memory.HOST
    device: str = "cpu"
