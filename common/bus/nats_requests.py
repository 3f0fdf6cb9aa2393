"""Requests over one NATS connection.

The client library's own `request` waits out its timeout when the connection breaks, and leaves an entry behind when it
cannot send. This one fails requests in flight at the moment of the break.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from nats.aio.client import Client

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.nats_wire import Arrived, has_room, listen, wait_room, write
from common.bus.observer import BusObserver, NoObserver, RequestKind
from common.bus.port import Headers
from common.bus.request_outcomes import observed

_NO_RESPONDERS: Final = "503"


class Fate(Enum):
    """Why a request has no answer."""

    LOST = auto()
    """The connection broke: it may have arrived."""
    OVERDUE = auto()
    """Nobody waits any longer."""


Answer = Arrived | Fate
Told = Callable[[Answer], None]
"""Hears once how a request ended. Called while messages are read: it returns at once and does not raise."""


class Requests:
    """Sends requests and hands each answer to whoever waits for it."""

    def __init__(self, client: Client, observer: BusObserver | None = None) -> None:
        self._client = client
        self._observer = observer or NoObserver()
        self._prefix = ""
        self._count = 0
        self._waiting: dict[str, Told] = {}

    async def start(self) -> None:
        """Listen for answers. Call it once, connected."""
        self._prefix = f"{self._client.new_inbox()}."
        await listen(self._client, f"{self._prefix}*", self._answered)

    async def ask(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        headers: Headers | None = None,
        kind: RequestKind = RequestKind.STORE,
    ) -> Arrived:
        """Send and return the first answer. Raises BusTimeout, NoResponders, BusUnavailable."""
        with observed(self._observer, kind):
            return await self._ask(subject, data, timeout_s, headers)

    async def _ask(self, subject: str, data: bytes, timeout_s: float, headers: Headers | None) -> Arrived:
        if timeout_s <= 0:
            raise BusTimeout(f"no time was left to ask {subject}")
        loop = asyncio.get_running_loop()
        if not has_room(self._client):
            ends = loop.time() + timeout_s
            await self._wait_room(subject, timeout_s)
            timeout_s = ends - loop.time()
        future: asyncio.Future[Answer] = loop.create_future()

        def told(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        inbox = self.post(subject, data, told, headers=headers)
        timer = loop.call_later(timeout_s, told, Fate.OVERDUE)
        try:
            answer = await future
        finally:
            timer.cancel()
            self.forget(inbox)
        if answer is Fate.OVERDUE:
            raise BusTimeout.of_request(subject, timeout_s)
        return answered(subject, answer)

    def post(self, subject: str, data: bytes, told: Told, *, headers: Headers | None = None) -> str:
        """Send at once, and let `told` hear the answer, or that the connection is lost; return what `forget` wants to know.

        Raises BusUnavailable (not done): then `told` hears nothing.
        """
        self._count += 1
        inbox = f"{self._prefix}{self._count}"
        write(self._client, subject, data, reply=inbox, headers=headers)
        self._waiting[inbox] = told
        return inbox

    def forget(self, inbox: str) -> None:
        """Want no answer any more. Twice is fine."""
        self._waiting.pop(inbox, None)

    @property
    def are_ready(self) -> bool:
        """Whether there is a connection, and so little unsent that `post` may be called."""
        return bool(self._client.is_connected) and has_room(self._client)

    def fail_all(self) -> None:
        """Fail what is in flight: its answers are lost with the connection."""
        waiting, self._waiting = self._waiting, {}
        for told in waiting.values():
            told(Fate.LOST)

    def _answered(self, message: Arrived) -> None:
        told = self._waiting.pop(message.subject, None)
        if told is not None:
            told(message)

    async def _wait_room(self, subject: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_room(self._client, subject)
        except TimeoutError:
            raise BusTimeout(f"{subject} was not asked in time: the server takes nothing") from None


def answered(subject: str, answer: Answer) -> Arrived:
    """The answer, if it is one. Raises BusTimeout, BusUnavailable when the connection broke, NoResponders when nobody listens."""
    if isinstance(answer, Fate):
        if answer is Fate.OVERDUE:
            raise BusTimeout(f"no answer from {subject} in time")
        raise BusUnavailable(f"the connection broke while {subject} was asked", maybe_done=True)
    if answer.status == _NO_RESPONDERS:
        raise NoResponders(f"nobody answers on {subject}")
    return answer
