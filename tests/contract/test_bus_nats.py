"""What only the NATS adapter has to get right: servers that are absent, old, mute or broken, and other NATS tools."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self
from unittest.mock import Mock

import nats
import pytest

from common.bus import nats_bucket, nats_reader
from common.bus.errors import BusTimeout, BusUnavailable, ServerTooOld, StorageRefused
from common.bus.nats_bucket import NatsBucket
from common.bus.nats_reader import Read, Reader, ReaderBroken
from common.bus.nats_wire import Arrived
from common.bus.port import BucketConfig, Entry, Snapshot, Stored, StreamConfig
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from tests.contract.bus_world import PATIENCE_S, open_nats, soon


@asynccontextmanager
async def pretender(info: str) -> AsyncIterator[str]:
    """A server that greets with `info` and answers pings: its URL."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {info}\r\n".encode())
        async for line in reader:
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def refusal(url: str, timeout_s: float) -> Exception:
    """Return what connecting raises."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_nats(url, timeout_s=timeout_s):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, Exception)
    return error


async def test_connecting_to_nobody_fails_in_time() -> None:
    """The library would try for ever; BusUnavailable names the address, without the password, and the reason."""
    error = await soon(refusal("nats://me:word@127.0.0.1:9", 0.3))
    assert isinstance(error, BusUnavailable)
    assert "127.0.0.1:9 within 0.3 s" in str(error)
    assert "word" not in str(error)
    assert not error.maybe_done


async def test_an_old_server_is_refused() -> None:
    """2.9, as distributions ship it, lacks what the adapter relies on."""
    async with pretender('{"version":"2.9.10","headers":true,"max_payload":1048576}') as url:
        error = await soon(refusal(url, PATIENCE_S))
    assert isinstance(error, ServerTooOld)
    assert "2.9.10" in str(error)
    assert "2.11" in str(error)


async def test_a_server_with_a_small_payload_limit_is_refused() -> None:
    """It would cut the connection in the middle of work."""
    async with pretender('{"version":"2.15.1","headers":true,"max_payload":65536}') as url:
        error = await soon(refusal(url, PATIENCE_S))
    assert isinstance(error, StorageRefused)
    assert "max_payload: 65536" in str(error)


async def test_a_connection_that_ends_for_good_is_told(nats_server: NatsServer) -> None:
    """The server throws a client out for a protocol error: `on_closed` hears the reason, calls fail."""
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with open_nats(nats_server.url, on_closed=closed.set_result) as bus:
        bus._connection.client._transport.write(b"NO SUCH COMMAND\r\n")
        assert "ended for good" in await soon(closed)
        with pytest.raises(BusUnavailable):
            await bus.publish("pd.x", b"")


async def test_closing_on_purpose_is_not_told(nats_server: NatsServer) -> None:
    """`on_closed` is for accidents."""
    told = Mock()
    async with open_nats(nats_server.url, on_closed=told):
        pass
    told.assert_not_called()


async def test_the_headers_of_the_caller_are_not_touched(nats_server: NatsServer) -> None:
    """The library writes into the dictionary that it is given."""
    headers = {"pd-type": "test"}
    async with open_nats(nats_server.url) as bus:
        await bus.ensure_stream(StreamConfig(name="HEADERS", subjects=("headers.>",)))
        await bus.publish("headers.a", b"", headers)
        bus.publish_event("headers.a", b"", message_id="1", headers=headers)
        assert await bus.flush_events()
    assert headers == {"pd-type": "test"}


async def test_buckets_are_those_of_every_nats_tool(nats_server: NatsServer) -> None:
    """The library's own key-value client reads what we write, deletions too, and we read what it writes."""
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="TOOLS", ttl_s=60.0, history=2))
        client = await nats.connect(nats_server.url)
        try:
            tool = await client.jetstream().key_value("TOOLS")
            revision = await bucket.put("a.b", b"ours")
            entry = await tool.get("a.b")
            assert (entry.value, entry.revision) == (b"ours", revision)
            status = await tool.status()
            assert (status.history, status.ttl) == (2, 60.0)
            await bucket.delete("a.b")
            with pytest.raises(nats.js.errors.KeyNotFoundError):
                await tool.get("a.b")
            theirs = await tool.put("c", b"theirs")
            assert await bucket.get("c") == Entry("c", b"theirs", theirs)
            await tool.purge("c")
            assert await bucket.get("c") is None
            assert await bucket.keys() == []
        finally:
            await client.close()


async def test_a_pass_costs_as_many_messages_as_its_last_entry_alone(nats_server: NatsServer) -> None:
    """Reading a thousand values asks the server a few times, whatever the bucket holds."""
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="LARGE"))
        for number in range(1000):
            await bucket.put(f"k{number}", b"x" * 500)
        client = bus._connection.client
        before = client.stats["out_msgs"]
        assert [entry.key async for entry in bucket.entries()] == [f"k{number}" for number in range(1000)]
        assert client.stats["out_msgs"] - before < 30


async def test_a_pass_whose_last_entry_is_never_sent_ends(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has said that one more waits, and it expired before it was sent: signs of life alone end nothing, but a pause does."""
    monkeypatch.setattr(nats_bucket, "_PASS_PAUSE_S", 1.5)
    opened = Reader.__aenter__

    async def opened_with_one_too_many(reader: Reader) -> Reader:
        await opened(reader)
        reader.num_pending += 1
        return reader

    monkeypatch.setattr(Reader, "__aenter__", opened_with_one_too_many)
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="EXPIRED"))
        with pytest.raises(BusUnavailable, match="no more"):
            await soon(bucket.keys())


async def test_passes_leave_no_consumers_behind(nats_server: NatsServer) -> None:
    """Listing keys, reading streams and watching give their consumers back."""
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="CONSUMERS"))
        await bucket.put("k", b"1")
        for _ in range(5):
            assert await bucket.keys() == ["k"]
            assert [entry.value async for entry in bucket.entries()] == [b"1"]
            watch = await bucket.watch()
            assert isinstance(await soon(anext(watch)), Entry)
            assert isinstance(await soon(anext(watch)), Snapshot)
            await watch.stop()

        async def count() -> int:
            return int((await bus._jetstream.info("KV_CONSUMERS"))["state"]["consumer_count"])

        async with asyncio.timeout(PATIENCE_S):
            while await count():
                await SystemClock().sleep(0.01)


async def test_a_watch_whose_consumer_is_lost_begins_again(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is a failure: without heartbeats, and without any reconnect, the watch repeats and goes on."""
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(nats_reader, "_SILENCE_S", 0.4)
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="SILENCE"))
        revision = await bucket.put("k", b"1")
        async with await bucket.watch() as watch:
            assert await soon(anext(watch)) == Entry("k", b"1", revision)
            assert await soon(anext(watch)) == Snapshot(frozenset({"k"}))
            (reader,) = bus._connection.readers
            await bus._jetstream.call(f"CONSUMER.DELETE.KV_SILENCE.{reader._consumer}")
            assert await soon(anext(watch)) == Entry("k", b"1", revision)
            assert await soon(anext(watch)) == Snapshot(frozenset({"k"}))
            later = await bucket.put("k", b"2")
            assert await soon(anext(watch)) == Entry("k", b"2", later)
        assert bus.reconnects == 0


async def test_an_idle_watch_is_kept_alive_by_heartbeats(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many silences long nothing happens: the pass is the same one, and nothing is repeated."""
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(nats_reader, "_SILENCE_S", 0.5)
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="IDLE"))
        async with await bucket.watch() as watch:
            assert await soon(anext(watch)) == Snapshot(frozenset())
            before = set(bus._connection.readers)
            await SystemClock().sleep(1.5)
            assert bus._connection.readers == before
            revision = await bucket.put("k", b"1")
            assert await soon(anext(watch)) == Entry("k", b"1", revision)


async def test_a_stream_longer_than_a_flow_control_window_is_read_whole(nats_server: NatsServer) -> None:
    """Megabytes come in order: the reader answers the server's flow control."""
    async with open_nats(nats_server.url) as bus:
        await bus.ensure_stream(StreamConfig(name="LONG", subjects=("long.>",)))
        for number in range(400):
            bus.publish_event("long.a", number.to_bytes(4, "big") * 8192, message_id=str(number))
        assert await bus.flush_events(PATIENCE_S)
        read = [int.from_bytes(stored.data[:4], "big") async for stored in bus.read_stream("LONG")]
        assert read == list(range(400))


async def test_an_answer_that_is_not_the_streams_own_is_refused(nats_server: NatsServer) -> None:
    """Somebody who answers on a stored subject races the acknowledgement: the event counts as lost, nothing breaks."""
    async with open_nats(nats_server.url) as bus, await bus.subscribe("stray.a") as subscription:
        bus.publish_event("stray.a", b"1", message_id="1")
        await (await soon(anext(subscription))).respond(b"not an acknowledgement")
        assert await bus.flush_events(PATIENCE_S)
        assert bus.events_dropped == 1


async def test_a_frozen_server_is_a_timeout(own_nats_server: NatsServer) -> None:
    """The connection stands but nothing comes: requests end by their own timeout."""
    async with open_nats(own_nats_server.url) as bus, await bus.subscribe("pd.mute"):
        assert own_nats_server._process is not None
        own_nats_server._process.send_signal(19)
        try:
            with pytest.raises(BusTimeout):
                await bus.request("pd.mute", b"", timeout=0.2)
        finally:
            own_nats_server._process.send_signal(18)
        await soon(bus.flush())


def reader_of(*messages: Arrived) -> Reader:
    """A reader to which these messages have come."""
    reader = Reader(Mock(), Mock(), set(), "S", ">", policy="all")
    for message in messages:
        reader._queue.put_nowait(message)
    return reader


def delivery(reply: str) -> Arrived:
    """A message of a consumer."""
    return Arrived("a.b", reply, b"x", {})


async def test_a_gap_in_the_deliveries_breaks_the_pass() -> None:
    """The second delivery is missing: whatever follows may be incomplete."""
    reader = reader_of(delivery("$JS.ACK.S.C.1.7.1.1000000000.9"), delivery("$JS.ACK.S.C.1.9.3.1000000000.7"))
    read = await reader.next()
    assert (read.stored.sequence, read.num_pending, read.stored.time) == (7, 9, 1.0)
    with pytest.raises(ReaderBroken, match="delivery 3 came instead of 2"):
        await reader.next()


async def test_a_heartbeat_that_counts_more_deliveries_breaks_the_pass() -> None:
    """The last delivery was lost, and only the heartbeat tells."""
    beats = [Arrived("", "", b"", {"Status": "100", "Nats-Last-Consumer": last}) for last in ("1", "2")]
    reader = reader_of(delivery("$JS.ACK.S.C.1.7.1.1000000000.0"), *beats)
    await reader.next()
    with pytest.raises(ReaderBroken, match="2 were delivered, 1 arrived"):
        await reader.next()


async def test_the_long_form_of_the_acknowledgement_subject_is_read() -> None:
    """Newer servers put domain and account before the stream, and a token at the end."""
    reader = reader_of(delivery("$JS.ACK._.ACCHASH.S.C.1.7.1.1500000000.0.random"))
    read = await reader.next()
    assert (read.stored.sequence, read.num_pending, read.stored.time) == (7, 0, 1.5)


async def test_what_is_no_delivery_is_passed_over() -> None:
    """Other status messages, and strangers who write to the inbox, do not end the process."""
    stray = [Mock(data=b"x", reply="", headers=None), Mock(data=b"", reply="", headers={"Status": "409"})]
    read = await reader_of(*stray, delivery("$JS.ACK.S.C.1.7.1.1000000000.0")).next()
    assert read.stored.sequence == 7


async def test_a_lost_connection_breaks_the_pass() -> None:
    """At once, not after the silence."""
    reader = reader_of()
    reader.break_off()
    with pytest.raises(ReaderBroken, match="connection was lost"):
        await reader.next()


def test_server_markers_count_as_deletions() -> None:
    """A marker that the server sets on expiry or purge hides the value."""
    bucket = NatsBucket("B", Mock(), Mock(), Mock())
    marker = Stored("$KV.B.k", b"", {"Nats-Marker-Reason": "MaxAge"}, 5, 0.0)
    assert bucket.entry_of(marker) == Entry("k", b"", 5, deleted=True)


async def test_a_reconnect_breaks_watches_without_waiting_for_silence(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch repeats because of the reconnect itself."""
    monkeypatch.setattr(nats_reader, "_SILENCE_S", 3600.0)
    async with open_nats(own_nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        async with await bucket.watch() as watch:
            assert await soon(anext(watch)) == Snapshot(frozenset())
            await asyncio.to_thread(own_nats_server.kill)
            await asyncio.to_thread(own_nats_server.start)
            assert await soon(anext(watch)) == Snapshot(frozenset())


async def test_reading_a_busy_stream_ends(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored after the call began is not read, however much keeps coming."""

    class Endless:
        num_pending = 1
        sequence = 0

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_error: object) -> None:
            return None

        async def next(self) -> Read:
            self.sequence += 1
            return Read(Stored("busy.a", b"", {}, self.sequence, 0.0), num_pending=1)

    async with open_nats(nats_server.url) as bus:
        await bus.ensure_stream(StreamConfig(name="BUSY", subjects=("busy.>",)))
        for number in range(2):
            bus.publish_event("busy.a", b"", message_id=str(number))
        assert await bus.flush_events(PATIENCE_S)
        monkeypatch.setattr(bus, "_reader", lambda *_arguments, **_options: Endless())
        assert [stored.sequence async for stored in bus.read_stream("BUSY")] == [1, 2]
