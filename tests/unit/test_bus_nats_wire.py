"""The bytes of messages, without a server."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from nats.aio.client import Client
from nats.errors import ProtocolError

from common.bus.errors import BusUnavailable
from common.bus.nats_wire import Arrived, Take, WireParser, frame, headers_of, listen, wait_room, write

TWO_MESSAGES = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"PING\r\n"
    b"HMSG a.c 1 _INBOX.9 25 27\r\nNATS/1.0\r\nname: value\r\n\r\n\r\n\r\n"
    b"HMSG a.d 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"MSG other 7 _INBOX.8 0\r\n\r\n"
)


class Server:
    """A client of the library without a connection, and what its parser is told."""

    def __init__(self) -> None:
        self.client = Client()
        self.client._send_subscribe = AsyncMock()
        self.client._process_ping = AsyncMock()
        self.client._error_cb = AsyncMock()
        self.parser = WireParser(self.client)
        self.arrived: list[Arrived] = []

    async def listen(self, take: Take | None = None) -> None:
        """Have a subscription, which is number 1."""
        await listen(self.client, "a.*", take or self.arrived.append)


def test_a_message_without_headers_is_one_line_and_its_data() -> None:
    """The reply is left empty where there is none."""
    assert frame("a.b", b"data") == b"PUB a.b  4\r\ndata\r\n"
    assert frame("a.b", b"", reply="r.1") == b"PUB a.b r.1 0\r\n\r\n"


def test_headers_stand_before_the_data_and_are_counted_apart() -> None:
    """Sizes are in bytes: of the headers, and of both together."""
    block = b"NATS/1.0\r\none: 1\r\ntwo: 2\r\n\r\n"
    written = frame("a", "ä".encode(), reply="r", headers={"one": "1", "two": "2"})
    assert written == b"HPUB a r %d %d\r\n%b\xc3\xa4\r\n" % (len(block), len(block) + 2, block)
    assert headers_of(block) == {"one": "1", "two": "2"}


def test_the_status_of_a_block_is_one_of_its_headers() -> None:
    """The server writes it into the first line, with or without words behind it."""
    assert headers_of(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    beat = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 3\r\nodd\r\n\r\n"
    assert headers_of(beat) == {"Status": "100", "Nats-Last-Consumer": "3"}
    assert Arrived("a", "", b"", headers_of(beat)).status == "100"
    assert Arrived("a", "", b"data", headers_of(beat)).status == ""
    assert Arrived("a", "", b"", {}).status == ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
async def test_messages_are_read_whole_however_they_are_cut(size: int) -> None:
    """Data may look like a line of the server; other lines are the library's; messages of nobody are passed over."""
    server = Server()
    await server.listen()
    sent = TWO_MESSAGES + b"MSG a.e 1 6\r\nPING\r\n\r\n"
    for begin in range(0, len(sent), size):
        await server.parser.parse(sent[begin : begin + size])
    assert server.arrived == [
        Arrived("a.b", "", b"hello", {}),
        Arrived("a.c", "_INBOX.9", b"\r\n", {"name": "value"}),
        Arrived("a.d", "", b"", {"Status": "503"}),
        Arrived("a.e", "", b"PING\r\n", {}),
    ]
    assert server.client._process_ping.await_count == 1


async def test_a_subscription_of_the_library_gets_its_messages_from_it() -> None:
    """Whoever subscribes by the library's own means misses nothing."""
    server = Server()
    subscription = await server.client.subscribe("a.*")
    await server.parser.parse(TWO_MESSAGES)
    first, second = await subscription.next_msg(), await subscription.next_msg()
    assert (first.subject, first.data, first.headers) == ("a.b", b"hello", None)
    assert (second.reply, second.data, second.headers) == ("_INBOX.9", b"\r\n", {"name": "value"})


async def test_the_library_may_hand_over_a_message_by_itself() -> None:
    """To it a taker is a future whose result it sets."""
    server = Server()
    await server.listen()
    await server.client._process_msg(1, b"a.b", b"r", b"data", b"NATS/1.0\r\nname: value\r\n\r\n")
    assert server.arrived == [Arrived("a.b", "r", b"data", {"name": "value"})]


async def test_the_mistake_of_one_taker_does_not_end_the_reading() -> None:
    """It is told as an error of the connection, and what follows is read."""
    server = Server()
    mistake = ValueError("mine")
    await server.listen(Mock(side_effect=[mistake, None, None]))
    await server.parser.parse(TWO_MESSAGES)
    server.client._error_cb.assert_awaited_once_with(mistake)
    assert server.client._process_ping.await_count == 1


async def test_nothing_of_a_connection_is_left_for_the_next_one() -> None:
    """Neither what was cut off, nor what stood behind the line that ended it."""
    server = Server()
    await server.listen()
    await server.parser.parse(b"MSG a.b 1 5\r\nhel")
    server.parser.reset()
    server.client._process_err = AsyncMock(side_effect=lambda _text: server.parser.reset())
    await server.parser.parse(b"-ERR 'stale connection'\r\nMSG a.b 1 5\r\nhel")
    await server.parser.parse(TWO_MESSAGES)
    assert [message.subject for message in server.arrived] == ["a.b", "a.c", "a.d"]


@pytest.mark.parametrize(
    "line",
    [b"NO SUCH LINE\r\n", b"\r\n", b"MSG a.b 1 x\r\n", b"HMSG a.b 1 x 5\r\n", b"MSG\r\n", b"X" * 5000 + b"\r\n"],
)
async def test_what_no_server_says_is_a_protocol_error(line: bytes) -> None:
    """The library then ends the connection."""
    with pytest.raises(ProtocolError):
        await Server().parser.parse(line)


def client(**fields: Any) -> Mock:
    """A client of the library as `write` sees it."""
    defaults: dict[str, Any] = {"is_connected": True, "_pending": [], "_pending_data_size": 0}
    return Mock(**{**defaults, "_flush_queue": asyncio.Queue(), **fields})


async def test_what_is_written_waits_in_order_and_is_written_out_once() -> None:
    """Who writes the buffer out is woken by the first message and takes them all."""
    one = client()
    write(one, "a", b"1")
    write(one, "b", b"2")
    assert one._pending == [b"PUB a  1\r\n1\r\n", b"PUB b  1\r\n2\r\n"]
    assert one._pending_data_size == sum(map(len, one._pending))
    assert one._flush_queue.qsize() == 1


async def test_nothing_is_written_without_a_connection() -> None:
    """It would be sent after the reconnect, however late that is."""
    one = client(is_connected=False)
    with pytest.raises(BusUnavailable) as caught:
        write(one, "a", b"1")
    assert not caught.value.maybe_done
    assert one._pending == []


async def test_who_waits_for_room_hears_that_the_server_takes_nothing() -> None:
    """A full buffer that nobody reads is an outage."""
    one = client(pending_data_size=1 << 30, flush=AsyncMock(side_effect=TimeoutError))
    with pytest.raises(BusUnavailable, match="the server takes nothing"):
        await wait_room(one, "a")
