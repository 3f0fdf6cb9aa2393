"""One transfer at the caller's end of a connection: what is sent, what is heard, and what that says about the owner's memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from common.dataplane.port import Outcome, TransferResult, WriteGrant
from common.dataplane.shm_memory import RegionMemory
from common.dataplane.tcp_channel import UNREACHABLE_S, Channel, ChannelError, Fault
from common.dataplane.tcp_segments import Segments, vector_into
from common.dataplane.tcp_vector import Vector
from common.dataplane.tcp_wire import (
    MAX_SEGMENTS,
    PREFIX,
    Kind,
    Operation,
    Reply,
    Status,
    WireError,
    decode_reply,
    encode_batch,
    encode_begin,
)

SILENCE_S: Final = float(UNREACHABLE_S)
"""How long an owner may neither take nor give a byte of a transfer. Its kernel may live on: only bytes tell that it does."""
SETTLE_S: Final = 0.25
"""How long a write that was given up waits to hear that the owner has stopped too."""


class Transfer:
    """Moves `segments` between a `local` region and the region at the other end of `channel`, once."""

    def __init__(
        self,
        channel: Channel,
        local: RegionMemory,
        segments: Segments,
        grant: WriteGrant,
        *,
        now: Callable[[], float],
        deadline: float,
    ) -> None:
        """Borrows `channel`, which must be greeted and idle. Afterwards it is of use only if `reusable`."""
        self._channel = channel
        channel.silence_s = SILENCE_S
        self._local = local
        self._segments = segments
        self._grant = grant
        self._now = now
        self._deadline = deadline
        self.reusable = False

    def write(self) -> TransferResult:
        """Send the bytes, and wait for the owner to say what became of them.

        FAILED_QUIESCED when the owner said so or ended the connection in order: it does that only after its last byte.
        INDETERMINATE when the connection broke, or the owner stayed silent for `SETTLE_S` after the transfer was given up.
        """
        try:
            for pieces in self._outgoing():
                self._channel.send_vector(pieces, self._deadline)
            return self._result(self._receive_answer(self._deadline))
        except ChannelError as error:
            return self._settle(error)
        except WireError as error:
            return TransferResult(outcome=Outcome.INDETERMINATE, reason=str(error))

    def read(self) -> TransferResult:
        """Ask for the bytes and put them into their places. Never INDETERMINATE: this end alone writes."""
        try:
            return self._fetch()
        except (ChannelError, WireError) as error:
            return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=str(error))

    def _fetch(self) -> TransferResult:
        head = self._begin(Operation.READ)
        for batch in self._segments.batches():
            self._channel.send(head + _table(batch), self._deadline)
            head = b""
            reply = decode_reply(self._channel.receive_bytes(PREFIX.size, self._deadline))
            if reply.kind is not Kind.DATA:
                return self._result(reply)
            if reply.nbytes != batch.nbytes:
                raise WireError("the peer sends another number of bytes than it was asked for")
            self._channel.receive_vector(vector_into(self._local, batch.local, batch.length), self._deadline)
        self._channel.send(head, self._deadline)  # without a batch it has not been sent yet
        return self._result(self._receive_answer(self._deadline))

    def _begin(self, operation: Operation) -> bytes:
        prefix = encode_begin(
            operation,
            self._grant,
            self._deadline - self._now(),
            num_batches=self._segments.num_batches,
            num_first=min(len(self._segments.length), MAX_SEGMENTS),
        )
        return prefix + array("I", self._grant.cells).tobytes()

    def _outgoing(self) -> Iterator[Vector]:
        head = self._begin(Operation.WRITE)
        for batch in self._segments.batches():
            yield vector_into(self._local, batch.local, batch.length, head=head + _table(batch))
            head = b""
        if head:  # no batch at all
            empty = self._segments.length
            yield vector_into(self._local, empty, empty, head=head)

    def _settle(self, error: ChannelError) -> TransferResult:
        """The transfer will not be completed: say so to the owner, and find out whether it has stopped."""
        if error.fault is Fault.ENDED:
            return TransferResult(outcome=Outcome.FAILED_QUIESCED, reason=str(error))
        # The owner sees the end of what was sent, stops, and says so. What it said before a reset can still be heard.
        self._channel.end_writing()
        try:
            result = self._result(self._receive_answer(self._now() + SETTLE_S))
        except ChannelError as after:
            # After a reset the end of the stream says nothing about the peer any more.
            ended = after.fault is Fault.ENDED and error.fault is not Fault.BROKEN
            outcome = Outcome.FAILED_QUIESCED if ended else Outcome.INDETERMINATE
            return TransferResult(outcome=outcome, reason=str(error))
        except WireError as after:
            return TransferResult(outcome=Outcome.INDETERMINATE, reason=str(after))
        self.reusable = False
        if result.outcome is not Outcome.DONE and error.fault in {Fault.LATE, Fault.STOPPED}:
            return msgspec.structs.replace(result, reason=str(error))
        return result

    def _receive_answer(self, deadline: float) -> Reply:
        reply = decode_reply(self._channel.receive_bytes(PREFIX.size, deadline))
        if reply.kind is not Kind.ANSWER:
            raise WireError("the peer sends data that nobody asked for")
        return reply

    def _result(self, reply: Reply) -> TransferResult:
        if reply.status is Status.DONE:
            if reply.nbytes != self._segments.nbytes:
                raise WireError("the peer says that it moved another number of bytes")
            self.reusable = True
            return TransferResult(outcome=Outcome.DONE, nbytes=reply.nbytes)
        return TransferResult(
            outcome=Outcome.FAILED_QUIESCED,
            nbytes=reply.nbytes,
            reason=self._reason(reply),
            is_stale=reply.status is Status.STALE,
        )

    def _reason(self, reply: Reply) -> str:
        try:
            return self._channel.receive_bytes(reply.length, self._now() + SETTLE_S).decode(errors="replace")
        except ChannelError:
            return "refused, for a reason that got lost"


def _table(batch: Segments) -> bytes:
    return encode_batch(len(batch.length), batch.nbytes) + batch.remote_table()
