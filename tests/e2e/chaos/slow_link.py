"""Everything that one address of this machine is sent goes through here: at full speed, slowly, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from common.runtime.clock import Deadline, SystemClock

HOST: Final = "127.0.0.2"
_BEHIND: Final = "127.0.0.1"
_PIECE_BYTES: Final = 16 << 10
_LISTEN: Final = "0A"
_FOUND_S: Final = 300.0
_POLL_S: Final = 0.1


class SlowLink:
    """Stands at `HOST` before every port at which a process listens on 127.0.0.1. A context."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._servers: dict[int, asyncio.Server] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._bytes_per_s = 0.0
        self._pipes: set[asyncio.Task[None]] = set()
        self.num_bytes = 0
        """That went through so far, both ways."""

    async def stand_before(self, pid: int) -> None:
        """Take a place before each port at which this process listens, once it listens at one."""
        deadline = Deadline.after(self._clock, _FOUND_S)
        while not (ports := set(_listening(pid))):
            assert not deadline.passed, f"process {pid} does not listen"
            await self._clock.sleep(_POLL_S)
        for port in ports - set(self._servers):
            self._servers[port] = await asyncio.start_server(partial(self._serve, port), HOST, port)

    def swallow(self) -> None:
        """From now on nothing comes out, and nobody is told."""
        self._open.clear()

    def let_through(self, bytes_per_s: float = 0.0) -> None:
        """Go on, with so many bytes a second on each connection; 0: without a bound."""
        self._bytes_per_s = bytes_per_s
        self._open.set()

    async def close(self) -> None:
        """Break all connections."""
        for server in self._servers.values():
            server.close()
        for pipe in self._pipes:
            pipe.cancel()

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        try:
            behind_reader, behind_writer = await asyncio.open_connection(_BEHIND, port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, behind_writer), name="there")
                    group.create_task(self._pump(behind_reader, writer), name="back")
            finally:
                behind_writer.close()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # a connection that breaks on one side breaks on the other
        finally:
            self._pipes.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE_BYTES):
            await self._open.wait()
            if self._bytes_per_s:
                await self._clock.sleep(len(data) / self._bytes_per_s)
            self.num_bytes += len(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


def _listening(pid: int) -> Iterator[int]:
    """Ports of 127.0.0.1 at which a process listens (`proc_pid_net(5)`: local address, state, inode)."""
    inodes = set()
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == _LISTEN and fields[9] in inodes and address == "0100007F":
            yield int(port, 16)
