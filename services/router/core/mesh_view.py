"""What a router knows of the mesh at one moment: the workers, and how prefill and decode workers stand with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.links import LinkRecord, LinkState
from contracts.subjects import link_key
from contracts.workers import WorkerRecord


@dataclass(frozen=True, slots=True)
class MeshView:
    """The records of `PD_WORKERS` by worker id, and those of `PD_LINKS` by key."""

    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    links: Mapping[str, LinkRecord] = field(default_factory=dict)

    def link(self, prefill: WorkerRecord, decode: WorkerRecord) -> LinkRecord | None:
        """The record of these two starts; None if there is none, or it is about other starts of the two."""
        link = self.links.get(link_key(prefill.worker_id, decode.worker_id))
        if link is None or (link.prefill.incarnation, link.decode.incarnation) != (
            prefill.incarnation,
            decode.incarnation,
        ):
            return None
        return link

    def is_linked(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        """Whether requests may be placed on this pair."""
        link = self.link(prefill, decode)
        return link is not None and link.state is LinkState.LINKED

    def link_problem(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        """Why requests may not be placed on this pair, in words; empty when they may."""
        link = self.link(prefill, decode)
        if link is None:
            return f"{prefill.worker_id} is not linked to {decode.worker_id} yet"
        match link.state:
            case LinkState.LINKED:
                return ""
            case LinkState.REFUSED:
                return f"{prefill.worker_id} has refused {decode.worker_id}: {link.reason}"
            case LinkState.UNLINKING:
                return f"{prefill.worker_id} is being unlinked from {decode.worker_id}"
            case LinkState.MEETING:
                tries = f": {link.num_failures} tries failed: {link.reason}" if link.num_failures else ""
                return f"{prefill.worker_id} is not linked to {decode.worker_id} yet{tries}"
