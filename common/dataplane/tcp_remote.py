"""A region that is reached over TCP, seen from a peer: one idle connection as a sign of life, and a few for transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from common.dataplane.checks import check_grant, check_runs
from common.dataplane.port import MAX_GENERATION, DataPlaneError, Outcome, Region, TransferResult, WriteGrant
from common.dataplane.shm_memory import RegionMemory
from common.dataplane.tcp_channel import Channel, ChannelError, Fault
from common.dataplane.tcp_dial import dial
from common.dataplane.tcp_region import STALE, TcpRegion
from common.dataplane.tcp_segments import segments_of
from common.dataplane.tcp_transfer import SILENCE_S, Transfer
from common.dataplane.tcp_wire import (
    MAX_BATCHES,
    PREFIX,
    Hello,
    Kind,
    Status,
    WireError,
    decode_reply,
    encode_hello,
)
from common.layout.run import Run
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError

MAX_TRANSFERS: Final = 8
"""Most transfers at once into one region; another waits for its turn."""
CONNECT_NAP_S: Final = 0.02
_LATE: Final = "the deadline has passed"
_DEAD: Final = "the peer has closed the region or died, or this end is closed"


class TcpRemoteRegion:
    """A peer's region. See `port.RemoteRegion`. A failed transfer costs its connection; the next one opens another."""

    def __init__(
        self,
        descriptor: RegionDescriptor,
        *,
        now: Callable[[], float],
        deadline: float,
        stop: threading.Event | None,
        on_close: Callable[[TcpRemoteRegion], None],
    ) -> None:
        """Use `TcpDataPlane.connect`. Raises `DataPlaneError`."""
        self.descriptor: Final = descriptor
        self._now = now
        self._on_close = on_close
        self._changed = threading.Condition()
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._num_transfers = 0
        self._closed = False
        self._closing = threading.Event()
        self._peer_alive = True
        self._lifeline: Final = open_channel(descriptor, now, deadline, stop)

    @property
    def peer_alive(self) -> bool:
        """False once the owner has closed the region, died or become unreachable, or this end is closed."""
        with self._changed:
            if self._peer_alive and not self._closed:
                self._peer_alive = self._lifeline.is_open
            return self._peer_alive and not self._closed

    def write(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Send `runs` from `local`. See `Transfer.write`; it may return `tcp_transfer.SETTLE_S` after the deadline."""
        return self._run(runs, local, grant, deadline, Transfer.write)

    def read(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Fetch `runs` into `local`. Never INDETERMINATE: this end alone writes."""
        return self._run(runs, local, grant, deadline, Transfer.read)

    def close(self) -> None:
        """Let go of the region. A write in flight stops sending, and ends with what the owner says to that; none begins any more."""
        with self._changed:
            self._closed = True
            self._closing.set()
            idle, self._idle = self._idle, []
            for channel in self._busy:
                channel.stop_writing()
            self._lifeline.close()
            self._changed.notify_all()
        for channel in idle:
            channel.close()
        self._on_close(self)

    def _run(
        self,
        runs: Sequence[Run],
        local: Region,
        grant: WriteGrant,
        deadline: float,
        move: Callable[[Transfer], TransferResult],
    ) -> TransferResult:
        here = _memory_of(local)
        if refused := self._refusal(runs, here, grant, deadline):
            return _failed(refused)
        segments = segments_of(runs)
        if segments.num_batches > MAX_BATCHES:
            return _failed(f"{len(segments.length)} pieces are too many for one transfer")
        if not self._enter(deadline):
            return _failed(_DEAD if self._closed else _LATE)
        try:
            channel = self._take(deadline)
        except DataPlaneError as error:
            self._leave(None, reusable=False)
            return _failed(error.message)
        transfer = Transfer(channel, here, segments, grant, now=self._now, deadline=deadline)
        try:
            result = move(transfer)
        finally:
            self._leave(channel, reusable=transfer.reusable)
        if self._closed and result.outcome is not Outcome.INDETERMINATE:
            return _failed(_DEAD, result.nbytes)
        return result

    def _refusal(self, runs: Sequence[Run], local: RegionMemory, grant: WriteGrant, deadline: float) -> str:
        """Why nothing is to be sent; "" when it may. Whether the grant is current only the owner knows."""
        refused = check_grant(grant, self.descriptor.num_cells) or check_runs(
            runs, local.length, self.descriptor.length
        )
        if refused:
            return refused
        if not 0 <= grant.generation <= MAX_GENERATION:
            return STALE
        if self._closed:
            return _DEAD
        return _LATE if self._now() >= deadline else ""

    def _enter(self, deadline: float) -> bool:
        """Wait for a place among the transfers; False when there is none in time, or this end is closed."""
        with self._changed:
            if self._num_transfers >= MAX_TRANSFERS:
                timeout_s = max(0.0, deadline - self._now())
                self._changed.wait_for(lambda: self._closed or self._num_transfers < MAX_TRANSFERS, timeout_s)
            if self._closed or self._num_transfers >= MAX_TRANSFERS:
                return False
            self._num_transfers += 1
            return True

    def _take(self, deadline: float) -> Channel:
        """An idle connection that the peer has not ended, or a new one. Raises `DataPlaneError`."""
        while (idle := self._take_idle()) is not None:
            if idle.is_open:
                return idle
            with self._changed:
                self._busy.discard(idle)
            idle.close()
        if not self.peer_alive:
            raise DataPlaneError(_DEAD)
        channel = open_channel(self.descriptor, self._now, min(deadline, self._now() + SILENCE_S), self._closing)
        with self._changed:
            if self._closed:
                channel.close()
                raise DataPlaneError(_DEAD)
            self._busy.add(channel)
        return channel

    def _take_idle(self) -> Channel | None:
        with self._changed:
            if not self._idle:  # as when this end is closed
                return None
            channel = self._idle.pop()
            self._busy.add(channel)
            return channel

    def _leave(self, channel: Channel | None, *, reusable: bool) -> None:
        with self._changed:
            self._num_transfers -= 1
            if channel is not None:
                self._busy.discard(channel)
                if reusable and not self._closed:
                    self._idle.append(channel)
                    channel = None
            self._changed.notify()
        if channel is not None:
            channel.close(abruptly=True)


def open_channel(
    descriptor: RegionDescriptor, now: Callable[[], float], deadline: float, stop: threading.Event | None = None
) -> Channel:
    """A greeted connection to the region.

    Raises `DataPlaneError` when its owner is not there, refuses, or stays silent until the deadline or until `stop` is set.
    """
    host, port = address_of(descriptor)
    try:
        hello = encode_hello(
            Hello(
                peer_id=descriptor.peer_id,
                incarnation=descriptor.incarnation,
                region_id=descriptor.region_id,
                generation=descriptor.generation,
                length=descriptor.length,
                num_cells=descriptor.num_cells,
            )
        )
    except WireError as error:
        raise DataPlaneError(f"descriptor: {error}") from error
    while True:
        try:
            channel = Channel(dial(host, port, now, deadline, stop), now, stop)
        except OSError as error:
            raise DataPlaneError(f"the peer at {descriptor.opaque!r} does not answer: {error}") from error
        try:
            channel.send(hello, deadline)
            reply = decode_reply(channel.receive_bytes(PREFIX.size, deadline))
            if reply.kind is Kind.ANSWER and reply.status is Status.DONE:
                channel.stop = None  # it was for the greeting
                return channel
            reason = channel.receive_bytes(reply.length, deadline).decode(errors="replace")
            refusal = f"the peer at {descriptor.opaque!r} refuses: {reason}"
        except WireError as error:
            refusal = f"what listens at {descriptor.opaque!r} is not a data plane: {error}"
        except ChannelError as error:
            # Without an answer: all places there are taken, or nobody is there. Some will become free.
            channel.close()
            if error.fault is Fault.STOPPED or now() + CONNECT_NAP_S >= deadline:
                raise DataPlaneError(f"the peer at {descriptor.opaque!r} does not answer: {error}") from error
            time.sleep(CONNECT_NAP_S)
            continue
        channel.close()
        raise DataPlaneError(refusal)


def address_of(descriptor: RegionDescriptor) -> tuple[str, int]:
    """Host and port of a descriptor. Raises `DataPlaneError`."""
    host, _, port = descriptor.opaque.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise DataPlaneError(f"descriptor: {descriptor.opaque!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _memory_of(region: Region) -> RegionMemory:
    if not isinstance(region, TcpRegion):
        raise InvalidValueError(field="local", value=type(region).__name__, rule="a region of a tcp data plane")
    return region.memory


def _failed(reason: str, nbytes: int = 0) -> TransferResult:
    return TransferResult(outcome=Outcome.FAILED_QUIESCED, nbytes=nbytes, reason=reason)
