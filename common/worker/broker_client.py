"""How a worker tells the broker what happened, the same message again until it is heard, and asks it what became of a handoff."""

from __future__ import annotations

from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.bus.rpc import was_not_looked_at
from common.runtime.clock import Clock, Deadline
from common.runtime.pauses import pauses
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, PdmeshError
from contracts.handoff import PrefillFinished, RequestEnded, TakenOver
from contracts.pull import PullEnded
from contracts.requests import Accepted, Answer, Refused, ReplayAnswer, ReplayTokens, TokenFrame
from contracts.subjects import BrokerVerb

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
ASK_S: Final = 2.0
"""How long the broker is given to answer once."""

Report = PrefillFinished | PullEnded | TakenOver | RequestEnded

_VERBS: Final[dict[type[Report], BrokerVerb]] = {
    PrefillFinished: BrokerVerb.PREFILL_FINISHED,
    PullEnded: BrokerVerb.PULL_ENDED,
    TakenOver: BrokerVerb.TAKEN_OVER,
    RequestEnded: BrokerVerb.ENDED,
}


class BrokerClient:
    """Delivers reports to the broker, and asks it. Sending the same report again is safe: the broker answers from its record."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def deliver(self, report: Report, deadline: Deadline) -> Answer:
        """Send until it is heard; the answer may be a refusal, but of a broker that was too busy to look at it.

        Raises DEADLINE_EXCEEDED when nobody heard it in time.
        """
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        subject = subjects.broker_rpc(_VERBS[type(report)])
        data = encode(report)
        while not deadline.passed:
            try:
                reply = await self._bus.request(subject, data, timeout=min(ASK_S, deadline.remaining))
                answer: Accepted | Refused = decode(reply.data, Answer)  # type: ignore[arg-type]  # a union is not a type
            except BusError:
                pass
            else:
                if not was_not_looked_at(answer):
                    return answer
            await self._clock.sleep(min(next(waits), deadline.remaining))
        raise PdmeshError(f"the broker did not answer {type(report).__name__}", code=ErrorCode.DEADLINE_EXCEEDED)

    async def outcome_of(self, handoff_id: str) -> TokenFrame | Accepted | Refused | None:
        """Ask once what became of a handoff: its end, `Accepted` while it is under way, or a refusal. None without an answer in time."""
        asked = encode(ReplayTokens(handoff_id=handoff_id, index=0))
        try:
            reply = await self._bus.request(subjects.broker_rpc(BrokerVerb.OUTCOME), asked, timeout=ASK_S)
            answer: TokenFrame | Accepted | Refused = decode(reply.data, ReplayAnswer)  # type: ignore[arg-type]  # a union is not a type
        except (BusError, CodecError):
            return None
        return answer
