"""What a broker that leads owes to the records of handoffs: none that has not ended may be left to itself."""

from __future__ import annotations

from typing import Any, Final

from common.bus.storage import handoffs_config
from contracts.codec import decode
from contracts.handoff import HandoffRecord
from services.broker.service import _STRAYS_AFTER_S, Broker
from services.broker.settings import BrokerSettings
from tests.simulation.sim_bus import SimulatedServer
from tests.simulation.verdicts import SimulatedLog, Verdicts

KEEP_ENDED_S: Final = 20.0
"""How long a broker remembers what has ended: longer than anybody asks."""

LOOKED_OVER_S: Final = 2 * (KEEP_ENDED_S + _STRAYS_AFTER_S) + 2 * BrokerSettings().store_timeout_s
"""How long a record may say that a handoff goes on of which nobody knows: to the leader's second look, if there was reason for one in
the pause before its first, and until its end is written.
"""

_HANDOFFS: Final = handoffs_config(1.0).name


def open_records(server: SimulatedServer) -> list[tuple[HandoffRecord, int]]:
    """The records that do not say that their handoffs have ended, with their revisions."""
    bucket = server.buckets.get(_HANDOFFS)
    entries = [] if bucket is None else [entry for entry in bucket.matching(">") if not entry.deleted]
    found = [(decode(entry.value, HandoffRecord), entry.revision) for entry in entries]
    return [(record, revision) for record, revision in found if not record.state.terminal]


class TermLog(SimulatedLog):
    """The log of a broker, that hears when a term of its leadership begins: what lies in the bucket then is its to go on with."""

    def __init__(self, verdicts: Verdicts, process: str, server: SimulatedServer) -> None:
        super().__init__(verdicts, process)
        self._server = server
        self._found: dict[str, int] = {}
        self._judged: Broker | None = None

    def info(self, event: str, **fields: Any) -> None:
        """See `Log.info`."""
        super().info(event, **fields)
        if event == "leadership_began":
            self._found = {record.handoff_id: revision for record, revision in open_records(self._server)}

    def judge(self, broker: Broker) -> None:
        """Note what the broker of this term, which has read the bucket, does not go on with; once for each term.

        A record that was written since the term began may have come too late to be read.
        """
        if broker is self._judged:
            return
        self._judged = broker
        for record, revision in open_records(self._server):
            if self._found.get(record.handoff_id) == revision and broker.handoff(record.handoff_id) is None:
                text = f"{self._process} leads, and nobody goes on with {record.handoff_id}, which is {record.state}"
                self._verdicts.broken("I5", text)
