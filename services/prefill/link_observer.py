"""What people see of links: events on the bus, metrics, and a line in the log for each transition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.bus.port import Bus
from common.runtime.clock import Clock, wall_text
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from contracts import subjects
from contracts.codec import encode
from contracts.links import LinkEvent, LinkEventName, LinkState
from contracts.requests import WorkerRef
from contracts.workers import WorkerRole
from services.prefill.core.pair_events import Tell


class LinkObserver:
    """Turns a `Tell` into everything that people look at. Never waits, never fails: an event that is dropped is counted."""

    def __init__(self, own: WorkerRef, bus: Bus, clock: Clock, log: Log, metrics: Metrics) -> None:
        self._own = own
        self._bus = bus
        self._clock = clock
        self._log = log
        self._count = 0
        self._transitions = metrics.counter(
            "link_transitions_total", "Links that were made, refused or undone", ["event"]
        )
        for name in LinkEventName:
            self._transitions.labels(name)
        self._links = metrics.gauge(
            "links", "Decode workers that are known, by how this worker stands with them", ["state"]
        )

    def watch(self, count: Callable[[LinkState], int]) -> None:
        """Let the gauge show what `count` says of each state."""
        for state in LinkState:
            self._links.labels(state).set_function(partial(count, state))

    def tell(self, peer: WorkerRef, tell: Tell) -> None:
        """Publish, count and log one transition."""
        self._transitions.labels(tell.event).inc()
        terms, refusal = tell.terms, tell.refusal
        rule = "" if refusal is None else refusal.rule
        reason = tell.reason if refusal is None else refusal.reason
        event = LinkEvent(
            event=tell.event,
            service=WorkerRole.PREFILL,
            instance=self._own.worker_id,
            prefill=self._own,
            decode=peer,
            at=wall_text(self._clock),
            at_ns=self._clock.monotonic_ns(),
            rule=rule,
            reason=reason,
            topology="" if terms is None else terms.topology,
            transport="" if terms is None else terms.transport,
            num_parts=0 if terms is None else terms.num_parts,
            has_drafts=terms is not None and terms.has_drafts,
            why_no_drafts="" if terms is None else terms.why_no_drafts,
        )
        self._count += 1
        subject = subjects.link_event(WorkerRole.PREFILL, self._own.worker_id, peer.worker_id, tell.event)
        # A repeat is dropped by its id: two starts of one worker must not share any.
        message_id = f"link-{self._own.worker_id}-{self._own.incarnation}-{self._count}"
        self._bus.publish_event(subject, encode(event), message_id=message_id)
        name = {LinkEventName.LINKED: "peer_linked", LinkEventName.UNLINKED: "peer_unlinked"}.get(tell.event)
        log = self._log.error if name is None else self._log.info
        log(
            name or "link_refused",
            peer=peer.worker_id,
            peer_incarnation=peer.incarnation,
            num_parts=event.num_parts,
            has_drafts=event.has_drafts,
            why_no_drafts=event.why_no_drafts,
            rule=rule,
            reason=reason,
        )
