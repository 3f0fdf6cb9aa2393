"""What the tcp data plane puts on the wire: frames with a prefix of 16 bytes, little-endian. `docs/adr` says why.

    caller   HELLO                         which region, of which start of which owner
    owner    ANSWER                        DONE, or why not
    then, for each transfer:
    caller   BEGIN cells                   write or read, under which grant, in how many batches
    write:   (BATCH table bytes)*          pieces at the owner's side, and their bytes in that order
    owner    ANSWER
    read:    caller BATCH table, owner (DATA bytes)* until the batch is there, and so on; at last the owner's ANSWER

An owner's ANSWER may come at any time, and ends the transfer. After any but DONE the owner closes the connection.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

from common.dataplane.port import SECRET_BYTES, WriteGrant

MAGIC: Final = b"pdt1"
"""First bytes of a connection; the digit is the version of this format."""
MAX_HELLO_BYTES: Final = 1024
MAX_REASON_BYTES: Final = 512
MAX_SEGMENTS: Final = 4096
"""Most pieces of one batch: their table is the only memory that a caller can make an owner fill, beside the region itself."""
MAX_BATCHES: Final = 0xFFFF
MAX_TIMEOUT_MS: Final = 300_000
"""Longest that an owner gives a transfer, whatever its caller asks for."""

PREFIX: Final = struct.Struct("<BBHIQ")
GRANT: Final = struct.Struct(f"<III{SECRET_BYTES}s")
HELLO: Final = struct.Struct("<4sH")
CELL_BYTES: Final = 4
SEGMENT_BYTES: Final = 16


class WireError(Exception):
    """Bytes that are not this protocol."""


class Kind(enum.IntEnum):
    """What follows a prefix."""

    BEGIN = 2
    BATCH = 3
    DATA = 4
    ANSWER = 5


class Operation(enum.IntEnum):
    """Which way the bytes of a transfer go, seen from the caller."""

    WRITE = 1
    READ = 2


class Status(enum.IntEnum):
    """How a transfer ended at the owner: it will write no more of it in either case."""

    DONE = 0
    FAILED = 1
    STALE = 2
    """It failed because its grant is not, or no longer, the one in its cells, or came without its secret."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Which memory a connection is for. All of it must be what the owner has under `region_id`."""

    peer_id: str
    incarnation: str
    region_id: str
    generation: int
    length: int
    num_cells: int


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a transfer; its cells follow."""

    operation: Operation
    num_batches: int
    num_first: int
    """Pieces of the first batch, so that all up to its bytes can be received at once."""
    num_cells: int
    generation: int
    lock_cell: int
    timeout_ms: int
    secret: bytes


_OPERATIONS: Final = {int(each): each for each in Operation}
_STATUSES: Final = {int(each): each for each in Status}
BEGIN_BYTES: Final = PREFIX.size + GRANT.size


def encode_hello(hello: Hello) -> bytes:
    """A HELLO, complete. Raises `WireError` when it is too long to be one."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > MAX_HELLO_BYTES:
        raise WireError(f"a greeting of {len(body)} bytes; the rule is: at most {MAX_HELLO_BYTES}")
    return HELLO.pack(MAGIC, len(body)) + body


def hello_length(head: bytes) -> int:
    """How many bytes follow the first ones of a connection. Raises `WireError`."""
    magic, length = HELLO.unpack(head)
    if magic != MAGIC or not 0 < length <= MAX_HELLO_BYTES:
        raise WireError("not a greeting")
    size: int = length
    return size


def decode_hello(body: bytes) -> Hello:
    """The greeting. Raises `WireError`."""
    try:
        return msgspec.msgpack.decode(body, type=Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a greeting: {type(error).__name__}") from error


def encode_begin(
    operation: Operation, grant: WriteGrant, timeout_s: float, *, num_batches: int, num_first: int
) -> bytes:
    """A BEGIN without its cells. The grant must be one that lies within a region; its secret may be anything."""
    timeout_ms = max(1, min(MAX_TIMEOUT_MS, int(timeout_s * 1000)))
    prefix = PREFIX.pack(Kind.BEGIN, operation, num_batches, len(grant.cells), grant.generation)
    # Cut or filled up: an owner compares all of them, and a secret of another length is not the right one anyway.
    return prefix + GRANT.pack(grant.lock_cell, timeout_ms, num_first, grant.secret[:SECRET_BYTES])


def decode_begin(head: bytes) -> Begin:
    """The fixed part of a BEGIN. Raises `WireError`."""
    kind, operation, num_batches, num_cells, generation = PREFIX.unpack_from(head)
    lock_cell, timeout_ms, num_first, secret = GRANT.unpack_from(head, PREFIX.size)
    if kind != Kind.BEGIN or operation not in _OPERATIONS:
        raise WireError("not the beginning of a transfer")
    if num_first > MAX_SEGMENTS or bool(num_first) != bool(num_batches):
        raise WireError("not the number of pieces of a first batch")
    return Begin(
        operation=_OPERATIONS[operation],
        num_batches=num_batches,
        num_first=num_first,
        num_cells=num_cells,
        generation=generation,
        lock_cell=lock_cell,
        timeout_ms=min(timeout_ms, MAX_TIMEOUT_MS),
        secret=secret,
    )


def encode_batch(num_segments: int, nbytes: int) -> bytes:
    """The prefix of a BATCH; its table follows."""
    return PREFIX.pack(Kind.BATCH, 0, 0, num_segments, nbytes)


def decode_batch(head: bytes | memoryview) -> tuple[int, int]:
    """Number of pieces and their bytes. Raises `WireError`."""
    kind, _, _, num_segments, nbytes = PREFIX.unpack(head)
    if kind != Kind.BATCH or not 0 < num_segments <= MAX_SEGMENTS:
        raise WireError("not a batch")
    return num_segments, nbytes


def encode_data(nbytes: int) -> bytes:
    """The prefix of some bytes of a read."""
    return PREFIX.pack(Kind.DATA, 0, 0, 0, nbytes)


def encode_answer(status: Status, nbytes: int, reason: str) -> bytes:
    """An ANSWER, complete; a long reason is cut."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return PREFIX.pack(Kind.ANSWER, status, len(text), 0, nbytes) + text


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix from an owner. DATA: `nbytes` bytes follow. ANSWER: `nbytes` were moved, and a reason of `length` bytes follows."""

    kind: Kind
    status: Status
    length: int
    nbytes: int


def decode_reply(head: bytes) -> Reply:
    """What an owner sends. Raises `WireError`."""
    kind, status, length, _, nbytes = PREFIX.unpack(head)
    if kind == Kind.DATA:
        return Reply(kind=Kind.DATA, status=Status.DONE, length=0, nbytes=nbytes)
    if kind == Kind.ANSWER and status in _STATUSES and length <= MAX_REASON_BYTES:
        return Reply(kind=Kind.ANSWER, status=_STATUSES[status], length=length, nbytes=nbytes)
    raise WireError("not an answer")
