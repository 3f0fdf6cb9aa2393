"""One entry of a pusher's queue."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.transfer.peers import Peer
from common.layout.bind import TokenChunk
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class PushTask:
    """What one layer's cache of one sequence has ready: KEY or VALUE of a chunk, or the state in `slot` (then `chunk` is None).

    Blocks and slot are the source's, `grant` names the destination's. `queued_ns` is when the content was complete.
    """

    seq: int
    handoff_id: str
    peer: Peer
    grant: Grant
    namespace: Namespace
    role: Role
    layer: int
    chunk: TokenChunk | None
    slot: int
    queued_ns: int
