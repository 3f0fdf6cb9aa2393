"""A process of a load test that does what it is asked over a pipe. It ends when its pipe does, so it outlives the test in no case."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol, Self

from contracts.errors import ErrorCode, PdmeshError

_ANSWER_S: Final = 120.0
_JOIN_S: Final = 10.0


class RemoteFailed(PdmeshError):  # noqa: N818 - an event that ends the test
    """A process of the test has failed, died, or does not answer."""

    code = ErrorCode.WORKER_FAILED


class Closable(Protocol):
    """What can live in such a process. Its methods are called by name."""

    def close(self) -> None:
        """Let go of everything; the last call."""
        ...


class Process(Protocol):
    """A process of the measurement, as the load test uses it."""

    def tell(self, what: str, *arguments: Any) -> None:
        """Have a method of what lives there called; `hear` gives its answer."""
        ...

    def hear(self) -> Any:
        """The answer to what was told. Raises PdmeshError when the process has failed, died or is silent."""
        ...

    def ask(self, what: str, *arguments: Any) -> Any:
        """`tell` and `hear`."""
        ...


class Remote:
    """A `Process` that is one. It ends with the context."""

    def __init__(self, name: str, kind: Callable[..., Closable], *arguments: Any) -> None:
        self.name: Final = name
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_live, args=(other, kind, arguments), name=name, daemon=True)
        self._process.start()
        other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_JOIN_S)

    def tell(self, what: str, *arguments: Any) -> None:
        """See `Process.tell`."""
        try:
            self._pipe.send((what, arguments))
        except OSError as error:
            raise RemoteFailed(f"{self.name} has died") from error

    def hear(self) -> Any:
        """See `Process.hear`."""
        try:
            if not self._pipe.poll(_ANSWER_S):
                raise RemoteFailed(f"{self.name} does not answer")
            good, value = self._pipe.recv()
        except EOFError as error:
            raise RemoteFailed(f"{self.name} has died") from error
        if not good:
            raise RemoteFailed(f"{self.name}: {value}")
        return value

    def ask(self, what: str, *arguments: Any) -> Any:
        """See `Process.ask`."""
        self.tell(what, *arguments)
        return self.hear()


def _live(pipe: Connection, kind: Callable[..., Closable], arguments: tuple[Any, ...]) -> None:
    """The life of a process: what is made first answers to everything that is asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the load test ends its processes itself
    lives: Closable | None = None
    try:
        while True:
            what, given = pipe.recv()
            try:
                if lives is None:
                    lives = kind(*arguments)
                answer = True, getattr(lives, what)(*given)
            except (PdmeshError, OSError) as error:
                answer = False, f"{type(error).__name__}: {error}"
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        pass  # the load test has ended
    finally:
        if lives is not None:
            lives.close()
