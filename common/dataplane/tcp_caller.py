"""One connection at the owner's end: greets the caller, then lands its writes in the region and serves its reads.

Nothing that a caller sends is believed: a frame that makes no sense ends the connection, and before a byte of a batch is received
into the region, its grant and secret have been checked and the whole table lies within bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from common.dataplane.cell_check import CellCheck
from common.dataplane.checks import check_grant
from common.dataplane.port import WriteGrant
from common.dataplane.refusal_counts import RefusalCounts
from common.dataplane.tcp_channel import Channel, ChannelError, Fault
from common.dataplane.tcp_pieces import MOST_FEW
from common.dataplane.tcp_region import RefusedError, StaleError, TcpRegion
from common.dataplane.tcp_segments import vector_into
from common.dataplane.tcp_vector import Vector
from common.dataplane.tcp_wire import (
    BEGIN_BYTES,
    CELL_BYTES,
    HELLO,
    MAX_SEGMENTS,
    PREFIX,
    SEGMENT_BYTES,
    Begin,
    Hello,
    Operation,
    Status,
    WireError,
    decode_batch,
    decode_begin,
    decode_hello,
    encode_answer,
    encode_data,
    hello_length,
)
from contracts.dataplane import Asked, RefusalReason

GREETING_TIMEOUT_S: Final = 5.0
HEAD_TIMEOUT_S: Final = 5.0
"""How long the head of a transfer may take once its first bytes are there."""
ANSWER_TIMEOUT_S: Final = 5.0
DRAIN_TIMEOUT_S: Final = 1.0
DRAIN_BYTES: Final = 64 << 20
_OUTSIDE: Final = "a piece is out of bounds"
_WRONG_SUM: Final = "the pieces of a batch do not add up"


_ASKED: Final = {Operation.WRITE: Asked.WRITE, Operation.READ: Asked.READ}


class _ReasonedError(RefusedError):
    """Refused for a reason that shows here already."""

    def __init__(self, text: str, reason: RefusalReason) -> None:
        super().__init__(text)
        self.reason: Final = reason


class Caller:
    """Serves one connection in the thread that calls `serve`, until it ends or `stop`."""

    def __init__(
        self,
        channel: Channel,
        find: Callable[[Hello], TcpRegion | None],
        now: Callable[[], float],
        refusals: RefusalCounts,
    ) -> None:
        """Owns `channel`; `find` gives the region that a greeting names."""
        self._channel = channel
        self._find = find
        self._now = now
        self._refusals = refusals
        self._asked = Asked.CONNECT
        self._let_in = False
        self._grant: WriteGrant | None = None
        self._batch = memoryview(bytearray(PREFIX.size + MAX_SEGMENTS * SEGMENT_BYTES))
        self.region: TcpRegion | None = None
        """The region that the caller wants, once it has said so."""

    @property
    def stopped(self) -> bool:
        """Whether it has been told to end."""
        return self._channel.stopped

    def stop(self) -> None:
        """From any thread: end the connection soon."""
        self._channel.stop_reading()

    def serve(self) -> None:
        """Return when the connection has ended, for whatever reason; nothing is written into the region after that."""
        try:
            region = self._greet()
            while True:
                head = self._receive_head()
                self._transfer(region, head)
        except RefusedError as error:
            self._count(error)
            status = Status.STALE if isinstance(error, StaleError) else Status.FAILED
            self._channel.say_last(encode_answer(status, 0, str(error)))
            self._channel.drain(DRAIN_BYTES, self._now() + DRAIN_TIMEOUT_S)
        except WireError:
            self._refusals.add(self._asked, RefusalReason.MALFORMED)  # the caller is not one of ours
        except ChannelError:
            pass  # the caller is gone, or was told to go
        finally:
            self._channel.close()

    def _count(self, error: RefusedError) -> None:
        """Count what is refused by its reason. A transfer that was let in and broke with its connection was not refused."""
        if isinstance(error, _ReasonedError):
            self._refusals.add(self._asked, error.reason)
        elif not self._let_in:
            self._refusals.add(self._asked, self._reason_at_entry(error))
        elif isinstance(error, StaleError):
            self._refusals.add(self._asked, RefusalReason.REVOKED)

    def _reason_at_entry(self, error: RefusedError) -> RefusalReason:
        """Why a transfer was not let in."""
        region, grant = self.region, self._grant
        if region is None or grant is None:
            raise AssertionError("who asks for a transfer has named a region and a grant")
        if check_grant(grant, region.memory.num_cells):
            return RefusalReason.CELLS
        if not CellCheck(region.memory, grant.cells).all_hold(grant.generation):
            return RefusalReason.STALE
        return RefusalReason.SECRET if isinstance(error, StaleError) else RefusalReason.REGION

    def _greet(self) -> TcpRegion:
        deadline = self._now() + GREETING_TIMEOUT_S
        length = hello_length(self._channel.receive_bytes(HELLO.size, deadline))
        hello = decode_hello(self._channel.receive_bytes(length, deadline))
        region = self._find(hello)
        if region is None:
            text = "no such region of this incarnation here, or another has taken its place"
            raise _ReasonedError(text, RefusalReason.REGION)
        self.region = region
        if self._find(hello) is not region:  # closed meanwhile, without an order to stop
            raise _ReasonedError("the region has been closed", RefusalReason.REGION)
        self._channel.send(encode_answer(Status.DONE, 0, ""), deadline)
        return region

    def _receive_head(self) -> bytes:
        """The fixed part of the next transfer. A caller may be silent for ever before it, but not in the middle of it."""
        self._channel.wait_for_input()
        return self._channel.receive_bytes(BEGIN_BYTES, self._now() + HEAD_TIMEOUT_S)

    def _transfer(self, region: TcpRegion, head: bytes) -> None:
        begin = decode_begin(head)
        self._asked, self._let_in = _ASKED[begin.operation], False
        if not 0 < begin.num_cells <= region.memory.num_cells:
            text = f"the grant names {begin.num_cells} cells of {region.memory.num_cells}"
            raise _ReasonedError(text, RefusalReason.CELLS)
        size = begin.num_cells * CELL_BYTES
        table_size = PREFIX.size + begin.num_first * SEGMENT_BYTES if begin.num_batches else 0
        rest = memoryview(self._channel.receive_bytes(size + table_size, self._now() + HEAD_TIMEOUT_S))
        first = rest[size:]
        self._grant = grant = WriteGrant(
            lock_cell=begin.lock_cell,
            cells=tuple(rest[:size].cast("I")),
            generation=begin.generation,
            secret=begin.secret,
        )
        deadline = self._now() + begin.timeout_ms / 1000
        match begin.operation:
            case Operation.WRITE:
                nbytes = self._write(region, begin, grant, first, deadline)
            case Operation.READ:
                nbytes = self._read(region, begin, grant, first, deadline)
        self._asked = Asked.CONNECT
        self._channel.send(encode_answer(Status.DONE, nbytes, ""), self._now() + ANSWER_TIMEOUT_S)

    def _write(self, region: TcpRegion, begin: Begin, grant: WriteGrant, first: memoryview, deadline: float) -> int:
        landing = region.enter(grant, self._channel)
        self._let_in = True
        nbytes = 0
        try:
            for _ in range(begin.num_batches):
                pieces = self._pieces_of(region, first or self._receive_table(deadline))
                first = first[:0]
                self.land(pieces, deadline)
                nbytes += pieces.nbytes
        except ChannelError as error:
            text = "the grant was revoked or the region closed" if error.fault is Fault.STOPPED else str(error)
            raise (RefusedError if landing.cells.all_hold(grant.generation) else StaleError)(text) from error
        finally:
            valid = region.leave(landing)
        if not valid:
            raise StaleError
        return nbytes

    def land(self, pieces: Vector, deadline: float) -> None:
        """Receive the bytes of one batch straight into the region. Raises `ChannelError`."""
        self._channel.receive_vector(pieces, deadline)

    def _read(self, region: TcpRegion, begin: Begin, grant: WriteGrant, first: memoryview, deadline: float) -> int:
        cells = region.check(grant)
        self._let_in = True
        nbytes = 0
        for _ in range(begin.num_batches):
            pieces = self._pieces_of(region, first or self._receive_table(deadline))
            first = first[:0]
            self.lend(pieces, deadline)
            nbytes += pieces.nbytes
        if not cells.all_hold(grant.generation):
            raise StaleError
        return nbytes

    def lend(self, pieces: Vector, deadline: float) -> None:
        """Send the bytes of one batch straight from the region. Raises `ChannelError`."""
        self._channel.send(encode_data(pieces.nbytes), deadline)
        self._channel.send_vector(pieces, deadline)

    def _receive_table(self, deadline: float) -> memoryview:
        """The next batch but for its bytes; the memory is used again for the one after it."""
        head = self._channel.receive_bytes(PREFIX.size, deadline)
        num_segments, _ = decode_batch(head)
        batch = self._batch[: PREFIX.size + num_segments * SEGMENT_BYTES]
        batch[: PREFIX.size] = head
        self._channel.receive(batch[PREFIX.size :], deadline)
        return batch

    @staticmethod
    def _pieces_of(region: TcpRegion, batch: memoryview) -> Vector:
        """The pieces of a batch, all of them within the region. Raises `RefusedError` or `WireError`."""
        num_segments, nbytes = decode_batch(batch[: PREFIX.size])
        table = batch[PREFIX.size :]
        if len(table) != num_segments * SEGMENT_BYTES:
            raise WireError("not as many pieces as announced")
        if num_segments <= MOST_FEW:
            return _few_of(region, table, nbytes)
        columns = np.frombuffer(table, "<u8").reshape(num_segments, 2)
        offsets, lengths = columns[:, 0], columns[:, 1]
        limit = np.uint64(region.memory.length)
        # The second comparison cannot wrap around: it is only made where the first one holds everywhere.
        if (lengths > limit).any() or (offsets > limit - lengths).any():
            raise _ReasonedError(_OUTSIDE, RefusalReason.BOUNDS)
        if not nbytes or sum(lengths.tolist()) != nbytes:
            raise WireError(_WRONG_SUM)
        return vector_into(region.memory, offsets, lengths)


def _few_of(region: TcpRegion, table: memoryview, nbytes: int) -> Vector:
    """The same for a short table, number by number."""
    numbers = table.cast("Q").tolist()
    offsets, lengths = tuple(numbers[::2]), tuple(numbers[1::2])
    limit = region.memory.length
    for offset, length in zip(offsets, lengths, strict=True):
        if offset + length > limit:
            raise _ReasonedError(_OUTSIDE, RefusalReason.BOUNDS)
    if not nbytes or sum(lengths) != nbytes:
        raise WireError(_WRONG_SUM)
    return vector_into(region.memory, offsets, lengths)
