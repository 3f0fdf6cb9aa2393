"""The data-plane port: memory that peers may write into or read from, one-sided, under a grant.

Calls block and are made from a rank's threads, never from an event loop. Deadlines are absolute seconds of the clock that
the adapter was given (on one host: CLOCK_MONOTONIC, which all processes share). Offsets are bytes from the start of a
region's data.

What a transfer copies is a sequence of runs, in any order. A `RunBatch` is one whose copies were worked out before and only placed;
an adapter that knows it need not look at single runs, and one that does not sees a sequence like any other.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from common.dataplane.refusal_counts import RefusalCounts
from common.layout.run import Run
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import GRANT_SECRET_BYTES

MAX_GENERATION = 2**64 - 1
"""Largest value of a generation cell (u64)."""
STOP_SLICE_S = 0.05
"""How often a call that waits for a peer looks whether it was told to stop; what the peer does wakes it at once."""
SECRET_BYTES = GRANT_SECRET_BYTES
"""Length of a grant's secret, where a transport checks it."""


class DataPlaneError(PdmeshError):
    """A region cannot be allocated, found or connected to. Transfers never raise it: they return an outcome."""

    code = ErrorCode.TRANSFER_FAILED


class Outcome(enum.Enum):
    """What is known of a transfer when its call returns."""

    DONE = "done"
    """Every byte is visible at the receiver, and the grant was valid to the end."""
    FAILED_QUIESCED = "failed_quiesced"
    """The transfer failed, and no byte of it will be written from now on; some may have been."""
    INDETERMINATE = "indeterminate"
    """The transfer may still be writing: both regions go to quarantine until the peer is quiescent or dead."""


class Quiescence(enum.Enum):
    """Whether every writer of a revoked grant is known to have stopped."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot_tell"


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a transfer, the bytes that are known to have moved, and why it failed ("" when it did not).

    `is_stale`: it failed because the memory's owner has taken the grant back, or never gave it. Nothing is wrong with the connection.
    """

    outcome: Outcome
    nbytes: int = 0
    reason: str = ""
    is_stale: bool = False


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to touch some cells of one region for as long as each of them holds `generation`.

    `lock_cell` is the cell whose lock byte stands for the whole grant: the grant's state slot, of which a request has
    exactly one. `cells` are all the cells that the transfer touches (blocks and slot). `secret` proves that the grant was given
    out, where anybody may reach the receiver (`Capabilities.checks_secret`).
    """

    lock_cell: int
    cells: tuple[int, ...]
    generation: int
    secret: bytes = b""

    def __repr__(self) -> str:
        """Everything but the secret: grants are shown in errors and logs."""
        return f"WriteGrant(lock_cell={self.lock_cell}, cells={self.cells}, generation={self.generation})"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter can do; callers choose by these, never by the adapter's name."""

    read: bool
    write: bool
    external_memory: bool
    """Memory that somebody else allocated can be registered."""
    cancel: bool
    """A transfer in flight can be stopped, with proof that it has."""
    needs_remote_progress: bool
    """The passive side must make calls for a transfer to advance."""
    revocable: bool
    """The transport checks generations itself, so a late write is refused rather than quarantined."""
    stops_writers: bool
    """A revocation ends the writes in flight under the grant; without it, it waits for them to end by themselves."""
    checks_secret: bool
    """A transfer needs the secret that its grant was opened with. Without it, holding the region's memory is proof enough."""
    max_batch: int
    """Most copies in one submission; longer batches are split by the adapter."""
    device_types: tuple[str, ...]


class Region(Protocol):
    """Memory that this process owns and peers may address."""

    @property
    def descriptor(self) -> RegionDescriptor:
        """What a peer needs in order to connect."""
        ...

    @property
    def data(self) -> memoryview:
        """The data part: writable, `descriptor.length` bytes. Views of it keep the memory mapped after `close`."""
        ...

    def generation(self, cell: int) -> int:
        """The value of one generation cell."""
        ...

    def open_grant(self, grant: WriteGrant) -> None:
        """Let those who hold `grant` in: its generation goes into its cells, and its secret is the one for its `lock_cell`.

        To be called before the grant is given out. Raises `InvalidValueError` as `set_generations` does, and for a secret that is
        not `SECRET_BYTES` long where the transport checks it.
        """
        ...

    def set_generations(self, cells: Sequence[int], value: int) -> None:
        """Store `value` into `cells`, without letting anybody in.

        Raises `InvalidValueError` for a cell outside the header or a value below one that a cell holds: generations only rise.
        """
        ...

    def revoke(self, cells: Sequence[int], lock_cell: int, value: int, deadline: float) -> Quiescence:
        """Raise `cells` to `value`, so that grants with an older generation are refused, then wait for writers in flight.

        YES: no write under an older grant that names `lock_cell` will land any more. NO: one is still in flight at `deadline`.
        CANNOT_TELL: the transport does not know. After anything but YES the memory must not be reused; calling again is safe.
        """
        ...

    def close(self) -> None:
        """Stop serving the region: peers see its death. Idempotent. Does not wait for writers, which keep their own mapping."""
        ...


class RemoteRegion(Protocol):
    """A peer's region, seen from a process that writes into it or reads from it. May be used by several threads."""

    @property
    def descriptor(self) -> RegionDescriptor:
        """The descriptor it was connected by."""
        ...

    @property
    def peer_alive(self) -> bool:
        """False once the owner has closed the region or died. Never True again after that."""
        ...

    def write(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from `local` into this region. Nothing is written when a run is out of bounds or the grant is stale."""
        ...

    def read(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from this region into `local`. DONE only if the grant's cells still hold its generation after the bytes.

        The caller owns the destination for the whole call; on failure what was copied there is garbage.
        """
        ...

    def close(self) -> None:
        """Let go of the region. Idempotent; a transfer in flight in another thread ends by itself."""
        ...


class DataPlane(Protocol):
    """One process's end of a transport."""

    @property
    def capabilities(self) -> Capabilities:
        """What this adapter can do."""
        ...

    @property
    def refusals(self) -> RefusalCounts:
        """What peers were refused at the regions of this end, as far as it is asked: where they map its memory they refuse themselves."""
        ...

    def allocate(self, nbytes: int, num_cells: int) -> Region:
        """Allocate a region of `nbytes` zeroed bytes and `num_cells` generation cells, all zero. Raises `DataPlaneError`."""
        ...

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> RemoteRegion:
        """Reach a peer's region. Raises `DataPlaneError` when it is gone, not ours to read, or not there by `deadline`.

        May be called by several threads at once. Once another thread sets `stop`, the call gives up within `STOP_SLICE_S`, however
        silent the peer; what was opened is closed. Only the look-up of a host's name cannot be interrupted.
        """
        ...

    def close(self) -> None:
        """Close every region and connection. Idempotent; leaves nothing behind on the host."""
        ...
