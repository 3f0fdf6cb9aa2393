"""What to do when frames do not come: ask those who send them, and the broker for the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, PdmeshError
from contracts.requests import (
    Accepted,
    DisaggregatedRoute,
    MixedRoute,
    Refused,
    ReplayAnswer,
    ReplayTokens,
    TokenFrame,
    WorkerRef,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from services.router.core.mesh_view import MeshView
from services.router.core.patience import Patience
from services.router.core.placement import ref_of
from services.router.core.token_order import TokenOrder
from services.router.dispatch import Attempt
from services.router.metrics import RouterMetrics
from services.router.token_inbox import Mailbox

_Answer: TypeAlias = TokenFrame | Accepted | Refused
_MAX_IDLE_FRAMES: Final = 16
"""Frames that may come without the next token before it is asked for: a stream that goes on behind a loss is never silent."""
ASK_S: Final = 2.0
"""How long each of those who may know is given to answer."""


class Replayer:
    """Asks for frames again, and says when that will not be needed any more. `view` tells which starts of workers are there."""

    def __init__(self, bus: Bus, metrics: RouterMetrics, tasks: BoundedTasks, *, view: Callable[[], MeshView]) -> None:
        self._bus = bus
        self._metrics = metrics
        self._tasks = tasks
        self._view = view
        self._closed = False

    def close(self) -> None:
        """Tell nobody of ends any more: the process ends, and what workers keep goes at the deadline."""
        self._closed = True

    async def ask(self, attempt: Attempt, order: TokenOrder) -> TokenFrame | None:
        """What the worker has told from the next token on, or how the broker says that it ended; None when nobody can tell now.

        What does not advance `order` is no news, and whoever says only that does not know what is missing. Raises `PdmeshError`
        (`worker_lost`) when that cannot be had any more: nobody knows it. Who does not answer may know it all the same, but not
        once its start is gone: what it knew went with it.
        """
        asked = ReplayTokens(handoff_id=attempt.handoff_id, index=order.next_index)
        unsure = False
        for worker, subject in _senders(attempt):
            answer = await self._ask(subject, asked)
            if isinstance(answer, TokenFrame):
                if order.advances(answer):
                    self._metrics.replays.labels("news").inc()
                    return answer
                if not (answer.token_ids or answer.final):  # the next token is still to be made
                    self._metrics.replays.labels("nothing_new").inc()
                    return None
            elif not (_is_unknown(answer) or (answer is None and self._is_gone(worker))):
                unsure = True
        answer = await self._ask(subjects.broker_rpc(BrokerVerb.OUTCOME), asked)
        if isinstance(answer, TokenFrame) and order.advances(answer):
            self._metrics.replays.labels("news").inc()
            return answer
        if not unsure and (isinstance(answer, TokenFrame) or _is_unknown(answer)):
            self._metrics.replays.labels("lost").inc()
            text = f"the tokens from {order.next_index} on are lost: no worker knows them any more"
            raise PdmeshError(text, code=ErrorCode.WORKER_LOST)
        self._metrics.replays.labels("unanswered" if answer is None else "nothing_new").inc()
        return None

    def acknowledge(self, attempt: Attempt, num_tokens: int) -> None:
        """Let the workers forget what they have told; it is done in the background. A lost word costs memory until the deadline."""
        if not self._closed:
            self._tasks.try_start(lambda: self._acknowledge(attempt, num_tokens))

    async def _acknowledge(self, attempt: Attempt, num_tokens: int) -> None:
        data = encode(ReplayTokens(handoff_id=attempt.handoff_id, index=num_tokens, ended=True))
        for _, subject in _senders(attempt):
            try:
                await self._bus.publish(subject, data)
            except BusError:
                return

    def _is_gone(self, worker: WorkerRef) -> bool:
        record = self._view().workers.get(worker.worker_id)
        return record is None or ref_of(record) != worker

    async def _ask(self, subject: str, asked: ReplayTokens) -> _Answer | None:
        try:
            reply = await self._bus.request(subject, encode(asked), timeout=ASK_S)
            answer: _Answer = decode(reply.data, ReplayAnswer)  # type: ignore[arg-type]  # a union is not a type
        except (BusError, CodecError):
            return None
        return answer


class FrameSource:
    """The frames of one attempt: as they come, and asked for when they do not.

    No answer is asked for again and again at the same pace: each question that does not bring the attempt forward doubles the wait
    for the next one. Frames that come and do not bring it forward either keep nobody from asking.
    """

    def __init__(self, replayer: Replayer, attempt: Attempt, mailbox: Mailbox, order: TokenOrder) -> None:
        self._replayer = replayer
        self._attempt = attempt
        self._mailbox = mailbox
        self._order = order
        self._patience = Patience()
        self._state = order.next_index, order.gap
        self._num_idle = 0

    async def next(self) -> TokenFrame:
        """Wait for a frame, which may say nothing new. The caller sets the deadline. Raises as `Replayer.ask` does."""
        state = self._order.next_index, self._order.gap
        if state != self._state:
            self._state = state
            self._num_idle = 0
            self._patience.heard()
        while True:
            if self._num_idle < _MAX_IDLE_FRAMES:
                frame = await self._mailbox.get(self._patience.wait_s(gap=self._order.gap))
                if frame is not None:
                    self._num_idle += 1
                    return frame
            self._num_idle = 0
            if self._mailbox.take_nudge():
                self._patience.heard()
            frame = await self._replayer.ask(self._attempt, self._order)
            self._patience.asked()
            if frame is not None:
                return frame


def _senders(attempt: Attempt) -> Iterator[tuple[WorkerRef, str]]:
    """Who may have sent tokens and where it is asked, the likeliest first: prefill ends what ends with its first token."""
    match attempt.route:
        case DisaggregatedRoute(prefill=prefill, decode=decoding):
            yield decoding, subjects.worker_rpc(WorkerRole.DECODE, decoding.worker_id, WorkerVerb.REPLAY)
            yield prefill, subjects.worker_rpc(WorkerRole.PREFILL, prefill.worker_id, WorkerVerb.REPLAY)
        case MixedRoute(mixed=mixed):
            yield mixed, subjects.worker_rpc(WorkerRole.MIXED, mixed.worker_id, WorkerVerb.REPLAY)


def _is_unknown(answer: _Answer | None) -> bool:
    return isinstance(answer, Refused) and answer.error.code is ErrorCode.UNKNOWN_HANDOFF
