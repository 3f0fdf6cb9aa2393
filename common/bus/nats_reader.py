"""One pass over a stream by an ephemeral push consumer of our own: in order, without gaps, or ReaderBroken.

The client library's ordered consumer and watcher go silent for ever after a restart of the server. This one asks the
server for a heartbeat and treats silence, a gap in the sequence and a reconnect alike: the pass is over, start another.
"""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from nats.aio.client import Client
from nats.aio.subscription import Subscription

from common.bus.errors import BusError, BusUnavailable
from common.bus.nats_storage import JetStream
from common.bus.nats_wire import CONNECTION_ERRORS, Arrived, listen, send
from common.bus.port import Stored

HEARTBEAT_S: Final = 1.0
_SILENCE_S: Final = 3.5
_INACTIVE_S: Final = 5.0
"""How long the server keeps a consumer that nobody listens to: a lost connection ends the pass, so nobody comes back to one."""
_CLOSE_TIMEOUT_S: Final = 1.0
_NANOSECONDS: Final = 1_000_000_000
_CONTROL: Final = "100"
_DELIVERY_PREFIX: Final = "$JS.ACK."
_LAST_CONSUMER_HEADER: Final = "Nats-Last-Consumer"
_STALLED_HEADER: Final = "Nats-Consumer-Stalled"


class ReaderBroken(BusError):  # noqa: N818 - a state, like its siblings in `errors`
    """The pass cannot go on: messages may be missing from here on."""


@dataclass(frozen=True, slots=True)
class Read:
    """One message of the pass, and how many more the server had for it at that moment."""

    stored: Stored
    num_pending: int


class Reader:
    """Stands in `open_readers` while it is open, so that the bus can break it off.

    Usage: `async with Reader(...) as reader`, then `await reader.next()` until it raises ReaderBroken.
    """

    def __init__(
        self,
        client: Client,
        jetstream: JetStream,
        open_readers: "set[Reader]",
        stream: str,
        subject: str,
        *,
        policy: str,
        headers_only: bool = False,
    ) -> None:
        self._client = client
        self._jetstream = jetstream
        self._open_readers = open_readers
        self._stream = stream
        self._options: dict[str, Any] = {
            "filter_subject": subject,
            "deliver_policy": policy,
            "headers_only": headers_only,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "idle_heartbeat": round(HEARTBEAT_S * _NANOSECONDS),
            "flow_control": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": round(_INACTIVE_S * _NANOSECONDS),
        }
        self._queue: asyncio.Queue[Arrived | None] = asyncio.Queue()  # bounded by the server's flow control
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._next_delivery = 1
        self.num_pending = 0
        """How many messages waited when the pass began."""

    async def __aenter__(self) -> Self:
        inbox = self._client.new_inbox()
        self._open_readers.add(self)
        try:
            self._subscription = await listen(self._client, inbox, self._queue.put_nowait)
            config = {**self._options, "deliver_subject": inbox}
            answer = await self._jetstream.call(
                f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
            )
        except CONNECTION_ERRORS as error:
            await self._close()
            raise BusUnavailable(f"{self._stream} cannot be read: {error}", maybe_done=False) from error
        except BaseException:
            await self._close()
            raise
        self._consumer = answer["name"]
        self.num_pending = int(answer["num_pending"])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def break_off(self) -> None:
        """End the pass from outside, because the connection was lost."""
        self._queue.put_nowait(None)

    async def next(self) -> Read:
        """Wait for the next message. Raises ReaderBroken."""
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    message = await self._queue.get()
            except TimeoutError:
                raise ReaderBroken(f"{self._stream}: the server went silent") from None
            if message is None:
                raise ReaderBroken(f"{self._stream}: the connection was lost")
            if message.status == _CONTROL:
                await self._control(message)
            elif message.reply.startswith(_DELIVERY_PREFIX):
                return self._data(message)

    def _data(self, message: Arrived) -> Read:
        tokens = message.reply.split(".")
        # $JS.ACK.<stream>.<consumer>.<count>.<stream seq>.<consumer seq>.<time>.<pending>; newer servers put
        # <domain>.<account> after ACK and may add tokens at the end.
        first = 4 if len(tokens) > 9 else 2
        sequence, delivery, time_ns, num_pending = (int(token) for token in tokens[first + 3 : first + 7])
        if delivery != self._next_delivery:
            raise ReaderBroken(f"{self._stream}: delivery {delivery} came instead of {self._next_delivery}")
        self._next_delivery += 1
        return Read(
            Stored(message.subject, message.data, message.headers, sequence, time_ns / _NANOSECONDS), num_pending
        )

    async def _control(self, message: Arrived) -> None:
        headers = message.headers
        last = headers.get(_LAST_CONSUMER_HEADER)
        if last is not None and int(last) != self._next_delivery - 1:
            raise ReaderBroken(f"{self._stream}: {last} were delivered, {self._next_delivery - 1} arrived")
        # Flow control: by answering we say that all before it was taken.
        for subject in (message.reply, headers.get(_STALLED_HEADER)):
            if subject:
                await send(self._client, subject, b"")

    async def _close(self) -> None:
        """Give the consumer back if the server is there; if not, it goes by itself once nobody listens."""
        self._open_readers.discard(self)
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if not self._client.is_closed:
                    await subscription.unsubscribe()
                if self._consumer and self._client.is_connected:
                    await self._jetstream.call(f"CONSUMER.DELETE.{self._stream}.{self._consumer}")
        except (BusError, TimeoutError, *CONNECTION_ERRORS):
            return
