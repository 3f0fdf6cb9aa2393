"""Token frames from the bus, sorted by request into bounded mailboxes."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.bus.port import Bus, Subscription
from common.bus.refusals import Refusals
from contracts import ids, subjects
from contracts.errors import InvalidValueError, PdmeshError
from contracts.requests import TokenFrame
from services.router.interruption import SlowReaderError

Overflowed = Callable[[PdmeshError], None]


class Mailbox:
    """Frames of one request's present attempt that wait to be read; what an earlier one still sends is thrown away."""

    def __init__(self, *, limit: int, overflowed: Overflowed) -> None:
        self._frames: deque[TokenFrame] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._overflowed = overflowed
        self._nudged = False
        self._attempt = 0

    def __len__(self) -> int:
        return len(self._frames)

    def begin(self, attempt: int) -> None:
        """Take frames of this attempt from now on, and of no other."""
        self._attempt = attempt
        self._frames.clear()

    def put(self, frame: TokenFrame) -> None:
        """Add a frame of the present attempt. If there is no room, the reader is told to end, and the frame is dropped."""
        if frame.attempt != self._attempt:
            return
        if len(self._frames) >= self._limit:
            message = f"the client does not read: {self._limit} pieces of its answer wait for it"
            self._overflowed(SlowReaderError(message))
            return
        self._frames.append(frame)
        self._arrived.set()

    def nudge(self) -> None:
        """Say that frames may have been lost: whoever waits for one need not wait any longer."""
        self._nudged = True
        self._arrived.set()

    def take_nudge(self) -> bool:
        """Whether there was a nudge since the last call."""
        nudged, self._nudged = self._nudged, False
        return nudged

    async def get(self, timeout_s: float) -> TokenFrame | None:
        """Return the next frame; None when none comes in time, or a nudge does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._frames:
                    if self._nudged:
                        return None
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return None
        return self._frames.popleft()


class TokenInbox:
    """One subscription for all requests of this router. Frames of requests that are over are thrown away."""

    def __init__(self, bus: Bus, refusals: Refusals, *, router_id: str, max_waiting_frames: int) -> None:
        self._bus = bus
        self._refusals = refusals
        self._router_id = router_id
        self._limit = max_waiting_frames
        self._mailboxes: dict[str, Mailbox] = {}

    @property
    def num_waiting(self) -> int:
        """Frames of all requests that wait to be read."""
        return sum(map(len, self._mailboxes.values()))

    async def open(self) -> Subscription:
        """Subscribe. Pass the subscription to `run`; requests may be sent once this has returned. Raises `BusError`."""
        return await self._bus.subscribe(subjects.tokens_filter(self._router_id))

    async def run(self, subscription: Subscription) -> None:
        """Sort frames until the bus is closed."""
        async with subscription:
            async for message in subscription:
                frame = self._refusals.message("tokens", message.data, TokenFrame, subject=message.subject)
                if frame is None:
                    continue
                error = _contradiction(frame, message.subject)
                if error is not None:
                    self._refusals.note("tokens", error, subject=message.subject)
                elif frame.request_id in self._mailboxes:
                    self._mailboxes[frame.request_id].put(frame)

    async def run_nudges(self) -> None:
        """After each loss of the connection, which loses frames, let every request ask for what it missed."""
        seen = self._bus.reconnects
        while True:
            seen = await self._bus.reconnected(seen)
            for box in self._mailboxes.values():
                box.nudge()

    @contextmanager
    def mailbox(self, request_id: str, overflowed: Overflowed) -> Iterator[Mailbox]:
        """Collect the frames of a request while the context lasts."""
        box = self._mailboxes[request_id] = Mailbox(limit=self._limit, overflowed=overflowed)
        try:
            yield box
        finally:
            del self._mailboxes[request_id]


def _contradiction(frame: TokenFrame, subject: str) -> InvalidValueError | None:
    """What in a frame cannot be true together: it belongs to the request of its subject, and to the handoff of its attempt."""
    request_id = subject.rsplit(".", 1)[-1]
    if frame.request_id != request_id:
        return InvalidValueError(field="request_id", value=frame.request_id, rule=f"{request_id}, as in the subject")
    handoff_id = ids.handoff_id(request_id, frame.attempt)
    if frame.handoff_id != handoff_id:
        return InvalidValueError(field="handoff_id", value=frame.handoff_id, rule=f"{handoff_id}: request and attempt")
    return None
