"""What lives in the processes of a data-plane measurement: one that receives, and one for each source."""

from __future__ import annotations

import os
import resource
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, assert_never

from common.dataplane.port import DataPlane, Region
from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from common.runtime.clock import SystemClock
from loadtest.dataplane_case import Case, Positions, pieces_of
from loadtest.dataplane_ends import (
    LOOPBACK,
    Address,
    Destination,
    MemcpySource,
    Method,
    PlaneDestination,
    PlaneSource,
    Source,
)
from loadtest.dataplane_figures import Block
from loadtest.dataplane_mooncake import MooncakeEnd, MooncakeSource
from loadtest.dataplane_socket import SocketDestination, SocketSource

_OWN_MEMORY: Final = (Method.SHM, Method.TCP)
_TILE_BYTES: Final = (1 << 20) + 4096
_clock: Final = SystemClock()


class DestinationProcess:
    """The process that receives, as it is itself: one memory for each source and way."""

    def __init__(self, methods: Sequence[Method], num_sources: int, region_bytes: int, folder: str) -> None:
        self._ends: list[dict[Method, Destination]] = []
        self._planes: list[DataPlane] = []
        for number in range(num_sources):
            ends: dict[Method, Destination] = {}
            memory: memoryview | None = None
            for method in sorted(methods, key=_OWN_MEMORY.__contains__, reverse=True):
                match method:
                    case Method.SHM | Method.TCP:
                        ends[method] = PlaneDestination(_plane(method, folder, f"destination-{number}"), region_bytes)
                        memory = ends[method].data
                    case Method.SOCKET | Method.MOONCAKE:
                        if memory is None:  # of the same kind as a data plane's
                            self._planes.append(_plane(Method.SHM, folder, f"memory-{number}"))
                            memory = self._planes[-1].allocate(region_bytes, 1).data
                        ends[method] = SocketDestination(memory) if method is Method.SOCKET else MooncakeEnd(memory)
                    case Method.MEMCPY:
                        pass  # stays within the source
                    case _:
                        assert_never(method)
            self._ends.append(ends)

    def addresses(self, number: int) -> dict[Method, Address]:
        """Where one source's memory is, by the way there."""
        return {method: end.address for method, end in self._ends[number].items()}

    def usage(self) -> float:
        """Processor seconds of this process so far."""
        return _usage()

    def clear(self, number: int, method: Method, position: int, span: int) -> None:
        """Forget what is in a part of the memory, so that what is there later has arrived since."""
        self._ends[number][method].data[position : position + span] = bytes(span)

    def checksum(self, number: int, method: Method, case: Case, position: int) -> int:
        """Of the bytes of one transfer, piece by piece in its order."""
        return _checksum(self._ends[number][method].data, pieces_of(case.runs(position), remote=True))

    def close(self) -> None:
        """Stop serving."""
        for ends in self._ends:
            for end in ends.values():
                end.close()
        for plane in self._planes:
            plane.close()


class SourceProcess:
    """The process of one source, as it is itself."""

    def __init__(self, methods: Sequence[Method], number: int, region_bytes: int, folder: str) -> None:
        self._methods = tuple(methods)
        self._planes: dict[Method, DataPlane] = {}
        self._regions: dict[Method, Region] = {}
        for method in (Method.SHM, Method.TCP):
            if method in methods or method is Method.SHM:
                self._planes[method] = _plane(method, folder, f"source-{number}")
                self._regions[method] = self._planes[method].allocate(region_bytes, 1)
                _fill(self._regions[method].data, number)
        self._region_bytes = region_bytes
        self._ends: dict[Method, Source] = {}
        self._positions = {method: Positions(region_bytes) for method in methods}

    def connect(self, addresses: dict[Method, Address]) -> None:
        """Link with the destination, by every way."""
        own = self._regions[Method.SHM]
        for method in self._methods:
            match method:
                case Method.SHM | Method.TCP:
                    self._ends[method] = PlaneSource(self._planes[method], self._regions[method], addresses[method])
                case Method.SOCKET:
                    self._ends[method] = SocketSource(own.data, addresses[method])
                case Method.MOONCAKE:
                    self._ends[method] = MooncakeSource(own.data, addresses[method])
                case Method.MEMCPY:
                    twin = self._planes[Method.SHM].allocate(self._region_bytes, 1)
                    self._ends[method] = MemcpySource(own.data, twin.data)
                case _:
                    assert_never(method)

    def place(self, method: Method, case: Case) -> int:
        """Where the next transfer is going to begin."""
        return self._positions[method].take(case.span)

    def check(self, method: Method, case: Case, position: int) -> int:
        """Do one transfer; return the checksum of what was sent."""
        end, runs = self._ends[method], case.runs(position)
        end.prepare(runs, case.nbytes)()
        return _checksum(end.data, pieces_of(runs, remote=False))

    def block(self, method: Method, case: Case, count: int) -> Block:
        """Do `count` transfers and time each."""
        end = self._ends[method]
        sends = [end.prepare(case.runs(self.place(method, case)), case.nbytes) for _ in range(count)]
        took_ns: list[int] = []
        cpu_s = _usage()
        began_ns = before_ns = _clock.monotonic_ns()
        for send in sends:
            send()
            after_ns = _clock.monotonic_ns()
            took_ns.append(after_ns - before_ns)
            before_ns = after_ns
        return Block(began_ns=began_ns, ended_ns=before_ns, took_ns=tuple(took_ns), cpu_s=_usage() - cpu_s)

    def close(self) -> None:
        """Let go of everything."""
        for end in self._ends.values():
            end.close()
        for plane in self._planes.values():
            plane.close()


def shared_folder(stack: ExitStack) -> str:
    """A folder in which the processes find each other, until `stack` ends."""
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-dataplane-"))


def _plane(method: Method, folder: str, name: str) -> DataPlane:
    if method is Method.TCP:
        return TcpDataPlane(LOOPBACK, peer_id=name, incarnation=name, now=_clock.monotonic)
    return ShmDataPlane(Path(folder), peer_id=name, incarnation=name, now=_clock.monotonic)


def _fill(data: memoryview, number: int) -> None:
    """Bytes that differ wherever one looks: the tile is not a multiple of any piece, and no two sources have the same."""
    tile = os.urandom(_TILE_BYTES - number)
    for start in range(0, len(data), len(tile)):
        data[start : start + len(tile)] = tile[: len(data) - start]


def _checksum(data: memoryview, pieces: Any) -> int:
    found = 0
    for offset, length in pieces:
        found = zlib.crc32(data[offset : offset + length], found)
    return found


def _usage() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
