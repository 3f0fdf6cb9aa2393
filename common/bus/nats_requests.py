"""Requests over one NATS connection.

The client library's own `request` waits out its timeout when the connection breaks, and leaves an entry behind when it
cannot send. This one fails requests in flight at the moment of the break.
"""

import asyncio
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.observer import BusObserver, NoObserver, RequestKind
from common.bus.port import Headers
from common.bus.request_outcomes import observed

_NO_RESPONDERS: Final = "503"
STATUS_HEADER: Final = "Status"
_MAX_UNSENT_BYTES: Final = 8 * 1024 * 1024
_SEND_TIMEOUT_S: Final = 5.0

CONNECTION_ERRORS: Final = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    OSError,
)


async def send(client: Client, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
    """Publish, or raise BusUnavailable (not done). Waits for the socket when much is unsent.

    The headers are copied, because the client library writes into the ones that it is given.
    """
    try:
        if client.pending_data_size > _MAX_UNSENT_BYTES:
            await client.flush(_SEND_TIMEOUT_S)
        await client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
    except CONNECTION_ERRORS as error:
        raise BusUnavailable(f"{subject} was not sent: {error}", maybe_done=False) from error
    except TimeoutError as error:
        raise BusUnavailable(f"{subject} was not sent: the server takes nothing", maybe_done=False) from error


class Requests:
    """Sends requests and hands each answer to whoever waits for it."""

    def __init__(self, client: Client, observer: BusObserver | None = None) -> None:
        self._client = client
        self._observer = observer or NoObserver()
        self._prefix = ""
        self._count = 0
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}

    async def start(self) -> None:
        """Listen for answers. Call it once, connected."""
        self._prefix = f"{self._client.new_inbox()}."
        await self._client.subscribe(f"{self._prefix}*", cb=self._answered)

    async def ask(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Headers | None = None,
        kind: RequestKind = RequestKind.STORE,
    ) -> Msg:
        """Send and return the first answer. Raises BusTimeout, NoResponders, BusUnavailable."""
        with observed(self._observer, kind):
            return await self._ask(subject, data, timeout_s, headers)

    async def _ask(self, subject: str, data: bytes, timeout_s: float, headers: Headers | None) -> Msg:
        if timeout_s <= 0:
            raise BusTimeout(f"no time was left to ask {subject}")
        if not self._client.is_connected:
            raise BusUnavailable(f"{subject} was not asked: there is no connection to the server", maybe_done=False)
        self._count += 1
        inbox = f"{self._prefix}{self._count}"
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = future
        try:
            async with asyncio.timeout(timeout_s):
                await send(self._client, subject, data, reply=inbox, headers=headers)
                answer = await future
        except TimeoutError:
            raise BusTimeout.of_request(subject, timeout_s) from None
        finally:
            del self._waiting[inbox]
        if answer is None:
            raise BusUnavailable(f"the connection broke while {subject} was asked", maybe_done=True)
        if not answer.data and answer.headers and answer.headers.get(STATUS_HEADER) == _NO_RESPONDERS:
            raise NoResponders(f"nobody answers on {subject}")
        return answer

    def fail_all(self) -> None:
        """Fail what is in flight: its answers are lost with the connection."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)

    async def _answered(self, message: Msg) -> None:
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)
