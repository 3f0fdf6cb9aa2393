"""The sockets between an engine and its ranks: one command to all, one answer of each in order, reports in between."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from common.engine.port import EngineDeadError, EngineError
from common.engine.ranks.datagrams import MAX_DATAGRAM_BYTES, Joiner, split
from common.engine.ranks.link_reports import LinkReports
from common.engine.ranks.refusal_news import RefusalNews
from common.engine.transfer.pull_reports import Pulls
from contracts.errors import CodecError, ErrorCode
from contracts.rank import (
    Done,
    PartPushed,
    PeerLinked,
    RankAnswer,
    RankCommand,
    RankProgress,
    RankScan,
    RankStarted,
    RefusedTransfers,
    SequenceDigests,
    StepDone,
    StopRank,
)
from contracts.rank_codec import decode_message, encode
from contracts.rank_pull import PullStopped, RoleMerged, ShardPulled

MAX_PUSH_REPORTS: Final = 1 << 16
MAX_READ: Final = 256
"""Datagrams of one rank that are taken in at a time: whoever waits for its reports has a turn, however fast it tells of pushes."""

ReportT = TypeVar("ReportT", PartPushed, RankProgress)


class _Ask:
    """One command under way: an answer of each rank, in any order of ranks."""

    def __init__(self, size: int, future: asyncio.Future[None]) -> None:
        self.answers: list[RankAnswer | None] = [None] * size
        self.future = future

    def put(self, rank: int, answer: RankAnswer) -> None:
        self.answers[rank] = answer
        if None not in self.answers and not self.future.done():
            self.future.set_result(None)


class RankChannels:
    """One socket a rank, read by the event loop.

    A rank that dies, breaks the protocol, or does not answer in time makes all of them dead: every call from then on raises
    `EngineDeadError`, and so do those that wait. `how_ended` says of a rank whose socket has ended what became of it.
    """

    def __init__(self, size: int, how_ended: Callable[[int], str] = lambda _rank: "ended") -> None:
        self._how_ended = how_ended
        self._connections: list[socket.socket] = []
        self._joiners = [Joiner() for _ in range(size)]
        self._pending: list[deque[_Ask]] = [deque() for _ in range(size)]
        self._turn = asyncio.Lock()
        # Reports are taken in even when nobody reads: a rank must not block on a slow reader. Beyond the bound the ranks are dead.
        self._pushes: asyncio.Queue[PartPushed | None] = asyncio.Queue(MAX_PUSH_REPORTS)
        self._progress: asyncio.Queue[RankProgress | None] = asyncio.Queue(MAX_PUSH_REPORTS)
        self.links = LinkReports(size)
        self.pulls = Pulls(size)
        self.refused = RefusalNews()
        self._death: str | None = None

    def attach(self, connections: Sequence[socket.socket]) -> None:
        """Take over the parent's ends, in rank order, and begin to read."""
        loop = asyncio.get_running_loop()
        for rank, connection in enumerate(connections):
            connection.setblocking(False)
            self._connections.append(connection)
            loop.add_reader(connection, self._read, rank)

    async def ask(self, commands: Sequence[RankCommand], timeout_s: float) -> tuple[RankAnswer, ...]:
        """Send each rank its command; the answer of each.

        Raises `EngineDeadError`, and `EngineError` for a command that is too long: no rank has got it then.
        """
        (answers,) = await self.ask_in_turn([commands], timeout_s)
        return answers

    async def ask_in_turn(
        self, rounds: Sequence[Sequence[RankCommand]], timeout_s: float
    ) -> list[tuple[RankAnswer, ...]]:
        """Ask round after round, with no command of anybody else in between. The timeout is for each round; raises as `ask` does."""
        # To wait for the turn is no sign of a silent rank: it is somebody else's command, which has a timeout of its own.
        async with self._turn:
            return [await self._ask(commands, timeout_s) for commands in rounds]

    async def _ask(self, commands: Sequence[RankCommand], timeout_s: float) -> tuple[RankAnswer, ...]:
        loop = asyncio.get_running_loop()
        ask = _Ask(len(commands), loop.create_future())
        try:
            async with asyncio.timeout(timeout_s):
                self.check_alive()
                for rank, message in enumerate(_encoded(commands)):
                    # From here on the answer will come, whether somebody still waits for it or not.
                    self._pending[rank].append(ask)
                    await self._send(rank, message)
                await ask.future
        except TimeoutError as error:
            silent = [rank for rank, answer in enumerate(ask.answers) if answer is None]
            self.die(f"ranks {silent} did not answer {type(commands[0]).__name__} within {timeout_s} s")
            raise EngineDeadError(self._death or "") from error
        return tuple(answer for answer in ask.answers if answer is not None)

    async def next_push(self) -> PartPushed:
        """The next report of a push, from any rank. Waits for ever."""
        return await self._next(self._pushes)

    async def next_progress(self) -> RankProgress:
        """The next report of a start's progress. Waits for ever."""
        return await self._next(self._progress)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` when the ranks are dead, or were never attached."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if not self._connections:
            raise EngineDeadError("the engine has not been started")

    def dismiss(self) -> None:
        """Tell every rank to leave, and take no answers any more. Nothing waits for them."""
        for connection in self._connections:
            try:
                for datagram in split(encode(StopRank())):
                    connection.send(datagram)
            except OSError:
                continue  # it has ended already, or is stuck and will be killed
        self.die("the engine was stopped")

    def close(self) -> None:
        """Close the sockets. To a rank that still runs this is the parent's end."""
        for connection in self._connections:
            connection.close()
        self._connections = []

    def die(self, reason: str) -> None:
        """Give the ranks up for this reason: nobody waits any longer. Idempotent; the first reason stays."""
        if self._death is not None:
            return
        self._death = reason
        loop = asyncio.get_running_loop()
        for connection in self._connections:
            loop.remove_reader(connection)
        for asks in self._pending:
            for ask in asks:
                if not ask.future.done():
                    ask.future.set_exception(EngineDeadError(reason))
                    # The caller may have gone; a failure that nobody awaits is no news then.
                    ask.future.exception()
            asks.clear()
        self.links.die(reason)
        self.pulls.die(reason)
        for queue in (self._pushes, self._progress):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _send(self, rank: int, message: bytes) -> None:
        try:
            for datagram in split(message):
                await asyncio.get_running_loop().sock_sendall(self._connections[rank], datagram)
        except OSError as error:
            self.die(f"rank {rank} {self._how_ended(rank)}")
            raise EngineDeadError(self._death or "") from error
        except asyncio.CancelledError:
            # Nobody knows whether this rank has the command that others have.
            self.die(f"sending to rank {rank} was interrupted")
            raise

    def _read(self, rank: int) -> None:
        """Take in some of what a rank has sent; called by the event loop, again and again while there is more."""
        for _ in range(MAX_READ):
            try:
                data = self._connections[rank].recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.die(f"rank {rank} {self._how_ended(rank)}")
                return
            try:
                whole = self._joiners[rank].put(data)
                if whole is None:
                    continue
                message = decode_message(whole)
                match message:
                    case PartPushed():
                        self._pushes.put_nowait(message)
                    case PeerLinked():
                        self.links.put(rank, message)
                    case ShardPulled() | RoleMerged() | PullStopped():
                        self.pulls.put(message)
                    case RefusedTransfers():
                        self.refused.put(rank, message)
                    case RankProgress():
                        self._progress.put_nowait(message)
                    case RankStarted() | StepDone() | SequenceDigests() | RankScan() | Done():
                        self._pending[rank].popleft().put(rank, message)
            except (CodecError, asyncio.QueueFull, IndexError) as error:
                self.die(f"rank {rank} broke the protocol: {type(error).__name__}: {error}")
                return

    async def _next(self, queue: asyncio.Queue[ReportT | None]) -> ReportT:
        report = await queue.get()
        if report is None:
            queue.put_nowait(None)
            raise EngineDeadError(self._death or "")
        return report


def _encoded(commands: Sequence[RankCommand]) -> list[bytes]:
    """All messages before the first is sent: what cannot be sent to one rank is sent to none."""
    try:
        return [encode(command) for command in commands]
    except CodecError as error:
        raise EngineError(error.message, code=ErrorCode.INTERNAL) from error
