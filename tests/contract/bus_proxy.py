"""A line to a NATS server on which a test can put words into the server's mouth."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on in both directions, for every connection that is made to it."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._to_clients: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.is_mute = False
        """While true, what the server says is lost; what it is told arrives."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join one client to the server, until either ends."""
        there, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._to_clients.add(writer)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_on(reader, to_server), name="to-server")
                tasks.create_task(_pass_on(there, writer, is_lost=lambda: self.is_mute), name="to-client")
        finally:
            self._to_clients.discard(writer)

    def tell_clients(self, words: bytes) -> int:
        """Say something in the server's name; return to how many."""
        for writer in self._to_clients:
            writer.write(words)
        return len(self._to_clients)

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._to_clients:
            writer.transport.abort()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_lost: Callable[[], bool] = lambda: False
) -> None:
    try:
        while data := await reader.read(65536):
            if is_lost():
                continue
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # an end has broken: so does the other
    finally:
        writer.close()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[Proxy]:
    """A line to the server at `url`."""
    proxy = Proxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        proxy.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
