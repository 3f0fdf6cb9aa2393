"""Starting ranks: as processes of a fork server that has torch loaded, or as threads for tests. No torch in the parent."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.forkserver import ensure_running
from typing import Final, Protocol

from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.passed_fd import PassedFd

PRELOADED: Final = ("torch", "common.engine.ranks.process")


_STATUS_WAIT_S: Final = 0.05
"""The fork server knows of a death a little later than the socket does."""


class RankHandle(Protocol):
    """A rank that has been started."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        ...

    def kill(self) -> None:
        """End it at once, where that is possible."""
        ...

    def how_ended(self) -> str:
        """How a rank ended whose socket has, in words: with which process and status. Blocks for a moment at most."""
        ...


class Launcher(Protocol):
    """Starts the ranks of one engine. Its methods block: call them from a thread, not from an event loop."""

    def launch(self, connections: list[socket.socket]) -> list[RankHandle]:
        """Start one rank for each connection, which it takes over; the caller closes its own copies."""
        ...

    def close(self) -> None:
        """Free what the ranks shared, after their end. Idempotent."""
        ...


class _ProcessHandle:
    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process

    def join(self, timeout_s: float) -> bool:
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def how_ended(self) -> str:
        self._process.join(_STATUS_WAIT_S)
        who, status = f"(pid {self._process.pid})", self._process.exitcode
        if status is None:
            return f"{who} has closed its socket"
        if status >= 0:
            return f"{who} ended with status {status}"
        return f"{who} was killed by signal {-status} ({_signal_name(-status)})"


class ProcessLauncher:
    """Ranks in processes. The first launch of a parent takes about a second, while the fork server loads torch.

    SIGINT and SIGTERM may reach a whole process group. They are the parent's to obey: ranks and fork server take no notice, and
    end when told to, when the parent is gone, and when they are killed. A parent that ends without `close` kills them.
    """

    def __init__(self) -> None:
        self._memory: GroupMemory | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []

    @staticmethod
    def warm() -> None:
        """Start the fork server, so that ranks start in milliseconds later. Blocks for about a second the first time."""
        context = multiprocessing.get_context("forkserver")
        # A preload that is missing is ignored silently; the names are checked by a test.
        context.set_forkserver_preload(list(PRELOADED))
        # Whoever is started while a signal is blocked inherits that. The tracker comes first: starting it unblocks what it blocks.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def launch(self, connections: list[socket.socket]) -> list[RankHandle]:
        """See `Launcher.launch`."""
        from common.engine.ranks import entry

        self.warm()
        # Before the exit hook of `multiprocessing`, which sends SIGTERM to who is left, and then waits for ever.
        atexit.register(self._kill)
        if len(connections) > 1:
            self._memory = GroupMemory.create(len(connections))
        context = multiprocessing.get_context("forkserver")
        handles: list[RankHandle] = []
        try:
            for number, connection in enumerate(connections):
                group = None if self._memory is None else PassedFd(self._memory.fileno())
                process = context.Process(
                    target=entry.run_rank, args=(connection, group), name=f"rank-{number}", daemon=True
                )
                process.start()
                self._processes.append(process)
                handles.append(_ProcessHandle(process))
        except BaseException:
            for handle in handles:
                handle.kill()
                handle.join(1.0)
            self.close()
            raise
        return handles

    def close(self) -> None:
        """See `Launcher.close`."""
        atexit.unregister(self._kill)
        if self._memory is not None:
            self._memory.close()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"


class _ThreadHandle:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed: it ends by itself, because its connection has been closed."""

    def how_ended(self) -> str:
        return "ended"


class ThreadLauncher:
    """Ranks in threads of this process, for tests: `serve_rank(connection, rank, size)` runs in each."""

    def __init__(self, serve_rank: Callable[[socket.socket, int, int], None]) -> None:
        self._serve_rank = serve_rank

    def launch(self, connections: list[socket.socket]) -> list[RankHandle]:
        """See `Launcher.launch`."""
        handles: list[RankHandle] = []
        for rank, connection in enumerate(connections):
            # The caller closes its copy of the connection.
            own = connection.dup()
            thread = threading.Thread(
                target=self._serve_rank, args=(own, rank, len(connections)), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            handles.append(_ThreadHandle(thread))
        return handles

    def close(self) -> None:
        """See `Launcher.close`."""
