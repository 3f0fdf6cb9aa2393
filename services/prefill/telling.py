"""What a prefill worker remembers of one handoff, and what it tells people of it: events, and one line at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from common.bus.handoff_events import HandoffEvents
from common.layout.ranges import RangeSet
from common.runtime.lifecycle import Log
from common.runtime.trace import within
from common.worker.core.parts import PartProgress, PushedParts
from common.worker.core.sequence import Sequence
from contracts.events import EventName
from contracts.handoff import PrefillFinished, RunPrefill
from contracts.manifest import Namespace
from contracts.rank import PartPushed
from services.prefill.core.owed_ranges import OwedKey
from services.prefill.layer_times import LayerTimes


class Prefill(msgspec.Struct, kw_only=True):
    """What is measured and remembered of one handoff here.

    `untold` are events about single parts and layers. There are many of them, and each costs the machine that the
    takeover runs on: they are published once the prefill is released, or when they are a second old.
    """

    command: RunPrefill
    sequence: Sequence
    parts: PushedParts
    owed: dict[OwedKey, RangeSet]
    parts_left: dict[int, int]
    accepted_ns: int
    started_ns: int = 0
    computed_ns: int = 0
    response_prepare_ms: float | None = None
    response_rpc_ms: float | None = None
    finished: PrefillFinished | None = None
    layers: LayerTimes = msgspec.field(default_factory=LayerTimes)
    untold: list[Callable[[], object]] = []
    failed: bool = False

    @property
    def queue_ms(self) -> float:
        """How long the prompt waited for memory."""
        return (self.started_ns - self.accepted_ns) / 1e6

    @property
    def compute_ms(self) -> float:
        """From then until its first token was there."""
        return (self.computed_ns - self.started_ns) / 1e6


class Telling:
    """Tells of prefills, each in its own trace."""

    def __init__(self, events: HandoffEvents, log: Log) -> None:
        self._events = events
        self._log = log

    def started(self, prefill: Prefill) -> None:
        """Say that the prompt begins."""
        self._event(
            prefill,
            EventName.PREFILL_STARTED,
            phase="prefill",
            at_ns=prefill.started_ns,
            prepare_ms=prefill.queue_ms,
            num_tokens=prefill.sequence.num_prompt_tokens,
        )()

    def part_pushed(self, prefill: Prefill, push: PartPushed, part: PartProgress) -> None:
        """Note that a part is complete, to be told later."""
        grant = prefill.sequence.push
        prefill.untold.append(
            self._event(
                prefill,
                EventName.PART_PUSHED,
                phase="push",
                at_ns=push.done_ns,
                started_ns=part.first_started_ns,
                last_started_ns=None if push.started_ns == part.first_started_ns else push.started_ns,
                duration_ms=part.push_ms,
                num_bytes=part.num_bytes,
                namespace=None if push.namespace is Namespace.TARGET else push.namespace,
                role=push.role,
                layer=push.layer,
                source_rank=push.rank,
                destination_rank=push.destination_rank,
                destination_dp_rank=0 if grant is None else grant.grant.dp_rank,
            )
        )

    def layers_computed(self, prefill: Prefill) -> None:
        """Note that all chunks are computed, to be told later: one event a layer and rank."""
        prefill.untold += [
            self._event(
                prefill,
                EventName.LAYER_COMPUTED,
                phase="prefill",
                at_ns=time.ended_ns,
                started_ns=time.started_ns,
                duration_ms=time.busy_ns / 1e6,
                num_chunks=time.num_chunks,
                layer=time.layer,
                source_rank=time.rank,
            )
            for time in prefill.layers
        ]

    def tell(self, prefill: Prefill) -> None:
        """Publish what is untold."""
        untold, prefill.untold = prefill.untold, []
        with within(prefill.sequence.trace):
            for publish in untold:
                publish()

    def ended(self, prefill: Prefill) -> None:
        """Publish what is untold, and write the line about a prefill that is over here."""
        self.tell(prefill)
        sequence, pushed = prefill.sequence, prefill.parts.reports()
        with within(sequence.trace):
            self._log.info(
                "prefill_ended",
                handoff_id=sequence.handoff_id,
                request_id=sequence.request_id,
                outcome=sequence.outcome or "released",
                num_prompt_tokens=sequence.num_prompt_tokens,
                bytes=sum(report.num_bytes for report in pushed),
                queue_ms=prefill.queue_ms if prefill.started_ns else None,
                compute_ms=prefill.compute_ms if prefill.computed_ns else None,
                push_ms={str(report.source_rank): report.push_ms for report in pushed},
                response_prepare_ms=prefill.response_prepare_ms,
                response_rpc_ms=prefill.response_rpc_ms,
            )

    def _event(self, prefill: Prefill, name: EventName, **fields: Any) -> Callable[[], object]:
        sequence = prefill.sequence
        return partial(
            self._events.publish,
            name,
            handoff_id=sequence.handoff_id,
            request_id=sequence.request_id,
            source_dp_rank=sequence.dp_rank,
            **fields,
        )
