"""Messages on the wire of one connection, both ways, without what the client library spends on each of them.

The library takes a coroutine and a future for each message that is sent, and a queue and a task's turn for each that arrives. Here a
message is written into the library's own buffer in one go, and one that arrives is handed to whoever takes it by the task that
reads. Connecting, pings, subscriptions and writing the buffer out stay the library's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from common.bus.errors import BusUnavailable

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

_LINE_END: Final = b"\r\n"
_NUM_END_BYTES: Final = len(_LINE_END)
_HEADERS_BEGIN: Final = "NATS/1.0"
_NUM_STATUS_CHARS: Final = 3
_MAX_SHOWN_BYTES: Final = 80
_LABELLED: Final = b"HMSG"
_MESSAGES: Final = {b"MSG": 5, _LABELLED: 6}
"""The lines before messages, without headers and with them, and of how many words one is that names a reply."""


class Arrived(NamedTuple):
    """One message as it came. `reply` is empty where no answer is expected."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str]

    @property
    def status(self) -> str:
        """The three digits of a message of the server's own, which carries no data; empty for every other one."""
        return self.headers.get(STATUS_HEADER, "") if self.headers and not self.data else ""


Take = Callable[[Arrived], None]
"""Gets each message in the order of arrival, in the middle of reading: it returns at once and does not raise."""


def frame(subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes that publish a message. Subject and headers have been checked (`common.bus.rules`)."""
    if not headers:
        return b"".join((f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, _LINE_END))
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    block = f"{_HEADERS_BEGIN}\r\n{lines}\r\n".encode()
    begin = f"HPUB {subject} {reply} {len(block)} {len(block) + len(data)}\r\n".encode()
    return b"".join((begin, block, data, _LINE_END))


def headers_of(block: bytes) -> dict[str, str]:
    """The headers in a block of them; the status that the server puts into its first line is under `STATUS_HEADER`."""
    first, _, rest = block.decode("utf-8", "replace").partition("\r\n")
    headers: dict[str, str] = {}
    status = first.removeprefix(_HEADERS_BEGIN).strip()[:_NUM_STATUS_CHARS]
    if status:
        headers[STATUS_HEADER] = status
    for line in rest.split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def write(
    client: Client, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
) -> None:
    """Publish, or raise BusUnavailable (not done). What is unsent meanwhile has no bound: see `has_room`."""
    if not client.is_connected:
        raise BusUnavailable(f"{subject} was not sent: there is no connection to the server", maybe_done=False)
    message = frame(subject, data, reply=reply, headers=headers)
    client._pending.append(message)  # noqa: SLF001 - the library's own way there is a coroutine a message
    client._pending_data_size += len(message)  # noqa: SLF001 - as above
    wake = client._flush_queue  # noqa: SLF001 - as above
    if wake.empty():
        wake.put_nowait(asyncio.get_running_loop().create_future())


def has_room(client: Client) -> bool:
    """Whether so little is unsent that more may be written at once."""
    return bool(client.pending_data_size <= _MAX_UNSENT_BYTES)


async def wait_room(client: Client, subject: str) -> None:
    """Wait for the socket while much is unsent. Raises BusUnavailable (not done), in time."""
    try:
        if not has_room(client):
            await client.flush(_SEND_TIMEOUT_S)
    except TimeoutError as error:  # before the others: it is an OSError, too
        raise BusUnavailable(f"{subject} was not sent: the server takes nothing", maybe_done=False) from error
    except CONNECTION_ERRORS as error:
        raise BusUnavailable(f"{subject} was not sent: {error}", maybe_done=False) from error


async def send(
    client: Client, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
) -> None:
    """Publish, or raise BusUnavailable (not done). Waits for the socket when much is unsent."""
    if not has_room(client):
        await wait_room(client, subject)
    write(client, subject, data, reply=reply, headers=headers)


async def listen(client: Client, subject: str, take: Take, *, queue_group: str = "") -> Subscription:
    """Hand every message of a subject or pattern to `take`. Raises the library's errors of a connection."""
    return await client.subscribe(subject, queue=queue_group, future=_Taker(take))


class _Taker:
    """Stands where the library wants the future of a subscription: it sets its result with each message that arrives."""

    def __init__(self, take: Take) -> None:
        self.take = take

    def cancelled(self) -> bool:
        """Whether nobody wants messages any more: an unsubscription says that."""
        return False

    def set_result(self, message: Msg) -> None:
        """Take a message that the library has read itself."""
        self.take(Arrived(message.subject, message.reply, message.data, dict(message.headers or {})))


class WireParser:
    """Reads what the server sends: messages for a `listen` by itself, everything else as the library does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._others = Parser(client)
        self._unread = b""
        self._num_resets = 0

    def reset(self) -> None:
        """Begin a connection: what was left of the one before is no part of it."""
        self._num_resets += 1
        self._unread = b""
        self._others.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take the next bytes of the connection. Raises ProtocolError for what is none of the server's lines."""
        unread = self._unread + data
        begun, at = self._num_resets, 0
        while (end := unread.find(_LINE_END, at)) >= 0:
            words = unread[at:end].split()
            body = end + _NUM_END_BYTES
            if words and words[0] in _MESSAGES:
                sid, num_header_bytes, num_bytes = _numbers(words)
                until = body + num_bytes
                if len(unread) < until + _NUM_END_BYTES:
                    break
                block, payload = unread[body : body + num_header_bytes], unread[body + num_header_bytes : until]
                at = until + _NUM_END_BYTES
                await self._deliver(sid, words, block, payload)
            else:
                line = unread[at:body]
                at = body
                await self._others.parse(line)
                if self._others.buf:
                    raise nats.errors.ProtocolError(f"not a line of the server's: {line[:_MAX_SHOWN_BYTES]!r}")
            if self._num_resets != begun:
                return
        self._unread = unread[at:]

    async def _deliver(self, sid: int, words: list[bytes], block: bytes, payload: bytes) -> None:
        subscription = self._client._subs.get(sid)  # noqa: SLF001 - a parser belongs to its client
        taker = None if subscription is None else subscription._future  # noqa: SLF001 - as above
        reply = words[3] if len(words) == _MESSAGES[words[0]] else b""
        if not isinstance(taker, _Taker):
            await self._client._process_msg(sid, words[1], reply, payload, block)  # noqa: SLF001 - as above
            return
        try:
            taker.take(Arrived(words[1].decode(), reply.decode(), payload, headers_of(block) if block else {}))
        except Exception as error:  # noqa: BLE001 - a mistake of one taker must not end the reading for all
            await self._client._error_cb(error)  # noqa: SLF001 - as above


def _numbers(words: list[bytes]) -> tuple[int, int, int]:
    """Which subscription a message is for, how many bytes of headers follow its line, and how many of headers and data together."""
    try:
        return int(words[2]), int(words[-2]) if words[0] == _LABELLED else 0, int(words[-1])
    except (IndexError, ValueError) as error:
        raise nats.errors.ProtocolError(f"not the line of a message: {words!r}") from error
