"""One connection to NATS, with everything decided that the client library leaves open.

It never gives up, says at once when it is gone, and fails whatever hoped for an answer over it.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

import nats.errors
from nats.aio.client import Client

from common.bus.errors import BusTimeout, BusUnavailable, StorageRefused
from common.bus.nats_reader import Reader
from common.bus.nats_requests import Requests
from common.bus.nats_wire import CONNECTION_ERRORS, WireParser
from common.bus.observer import BusObserver
from common.bus.server import check_version
from common.runtime.lifecycle import Log
from common.runtime.setting_values import shown
from contracts.codec import MAX_MESSAGE_BYTES

_FLUSH_TIMEOUT_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 2.0
_RECONNECT_WAIT_S: Final = 0.25
_RECONNECT_JITTER_MS: Final = 150
PING_EVERY_S: Final = 1.0
MAX_UNANSWERED_PINGS: Final = 2
"""One more, and the connection is given up: a server that stands still is an outage, noticed before anybody's silence is judged."""
_PUBLISH_COMMANDS: Final = (b"PUB ", b"HPUB ")


class Connection:
    """The library's client, its requests, and what is known of its state."""

    def __init__(self, log: Log, on_closed: Callable[[str], None] | None, observer: BusObserver) -> None:
        self.client = Client()
        self.client._ps = WireParser(self.client)  # noqa: SLF001 - there is no other way to give it one
        self.requests = Requests(self.client, observer)
        self.readers: set[Reader] = set()
        """Open readers: a lost connection ends their pass."""
        self.reconnects = 0
        self.is_closing = False
        self._log = log
        self._on_closed = on_closed
        self._observer = observer
        self._changed = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether the server is reachable as far as is known."""
        return bool(self.client.is_connected)

    async def open(self, servers: list[str], *, name: str, timeout_s: float) -> None:
        """Connect to one of these URLs. Raises BusUnavailable, ServerTooOld, StorageRefused."""
        place = ", ".join(shown("nats_url", server) for server in servers)
        try:
            # A server that is not there does not make `connect` fail: it tries for ever.
            async with asyncio.timeout(timeout_s):
                await self.client.connect(
                    servers=servers,
                    name=name,
                    max_reconnect_attempts=-1,  # by default it gives up for good after 60 tries
                    reconnect_time_wait=_RECONNECT_WAIT_S + secrets.randbelow(_RECONNECT_JITTER_MS) / 1000,
                    connect_timeout=2,
                    ping_interval=PING_EVERY_S,
                    max_outstanding_pings=MAX_UNANSWERED_PINGS,
                    pending_size=-1,  # while disconnected, fail at once instead of buffering what nobody waits for
                    error_cb=self._errored,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._came_back,
                    closed_cb=self._closed,
                )
        except TimeoutError:
            reason = self.client.last_error or "no answer"
            raise BusUnavailable(f"no server at {place} within {timeout_s} s: {reason}", maybe_done=False) from None
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"cannot connect to {place}: {error}", maybe_done=False) from error
        check_version(repr(self.client.connected_server_version))
        if self.client.max_payload < MAX_MESSAGE_BYTES:
            rule = f"the server's max_payload is at least {MAX_MESSAGE_BYTES}"
            raise StorageRefused(f"max_payload: {self.client.max_payload} is not allowed; the rule is: {rule}")
        await self.requests.start()
        await self.flush()

    def check_up(self) -> None:
        """Raise BusUnavailable while there is no connection."""
        if self.is_closing:
            raise BusUnavailable("the bus is closed", maybe_done=False)
        if not self.is_up:
            raise BusUnavailable("there is no connection to the server", maybe_done=False)

    async def wait_up(self) -> None:
        """Return while there is a connection, at once or later."""
        while not self.is_up:
            self._changed.clear()
            await self._changed.wait()

    async def reconnected(self, after: int) -> int:
        """Wait until `reconnects` is above `after`, and return it."""
        while self.reconnects <= after:
            self._changed.clear()
            await self._changed.wait()
        return self.reconnects

    async def flush(self) -> None:
        """Return once the server has taken all that was sent before. Raises BusUnavailable, BusTimeout."""
        self.check_up()
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._write_out()
                await self.client.flush(_FLUSH_TIMEOUT_S)
        except TimeoutError as error:
            raise BusTimeout(f"the server did not answer within {_FLUSH_TIMEOUT_S} s") from error
        except CONNECTION_ERRORS as error:
            raise BusUnavailable(f"not flushed: {error}", maybe_done=True) from error
        self.check_up()  # the library's flush also succeeds on a connection that is gone

    async def _write_out(self) -> None:
        """Wait until all that was sent before has been written.

        The library writes its ping past what still waits to be written: without this, the server's answer to it says
        nothing about a subscription that was made just before. Its own call for this swallows a cancellation.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.client._flush_queue.put(written)  # noqa: SLF001 - see above
        await written

    async def close(self) -> None:
        """End it. Twice is fine."""
        if self.is_closing:
            return
        self.is_closing = True
        self._lose()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.client.close()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            self._log.error("bus_close_failed", error=repr(error))

    def _lose(self) -> None:
        """Fail whatever hoped for something from the connection that is gone."""
        self.requests.fail_all()
        for reader in self.readers:
            reader.break_off()

    async def _disconnected(self) -> None:
        if not self.is_closing:
            num_lost = self._drop_unsent()
            self._log.error("bus_disconnected", num_lost=num_lost)
            self._observer.disconnected()
            self._observer.publishes_lost(num_lost)
        self._lose()

    def _drop_unsent(self) -> int:
        """Throw away what the library has not written yet, and say how many messages that were.

        It would send them after the reconnect, however long that takes: late, and after their senders have acted on
        the loss. Subscriptions among them are not lost, since a reconnect repeats those.
        """
        unsent: list[bytes] = self.client._pending  # noqa: SLF001 - the library has no call for this
        self.client._pending = []  # noqa: SLF001 - as above
        self.client._pending_data_size = 0  # noqa: SLF001 - as above
        return sum(command.startswith(_PUBLISH_COMMANDS) for command in unsent)

    async def _came_back(self) -> None:
        self._log.info("bus_reconnected")
        self.reconnects += 1
        self._observer.reconnected()
        self._changed.set()

    async def _errored(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._observer.messages_dropped(1)  # the library's own queue was full: the loop was blocked for long
        if self.is_up and not self.is_closing:  # while it is down, every try to come back fails: that is known
            self._log.error("bus_error", error=repr(error))

    async def _closed(self) -> None:
        if not self.is_closing:
            reason = f"the connection to the server has ended for good: {self.client.last_error!r}"
            self._log.error("bus_closed", reason=reason)
            if self._on_closed is not None:
                self._on_closed(reason)
