"""A pusher whose writes come to what a test says, and tasks for it."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_task import PushTask
from common.engine.transfer.pusher import Pusher
from common.layout.bind import TokenChunk
from common.runtime.clock import SystemClock
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed

CLOCK = SystemClock()
NUM_LAYERS = 8


def linked() -> Peer:
    """One link with a worker of one rank: a peer that is owed a state of 8 bytes of each layer."""
    parts: dict[Any, Any] = {}
    for layer in range(NUM_LAYERS):
        planned = SimpleNamespace(dst_rank=0, src_rank=0, namespace=Namespace.TARGET, role=Role.SSM, layer=layer)
        parts[Namespace.TARGET, Role.SSM, layer] = (SimpleNamespace(part=planned, state_bytes=8),)
    return Peer(parts=parts, templates=(), regions={}, num_blocks=1, num_slots=1)


def task_of(
    seq: int,
    peer: Peer,
    *,
    layer: int = 0,
    worker_id: str = "d",
    chunk: TokenChunk | None = None,
    role: Role = Role.SSM,
) -> PushTask:
    """What a layer has ready of a sequence."""
    return PushTask(
        seq=seq,
        handoff_id=f"h{seq}",
        peer=peer,
        grant=Grant(worker_id=worker_id, incarnation="j", generation=1, block_ids=(0,), slot=0),
        namespace=Namespace.TARGET,
        role=role,
        layer=layer,
        chunk=chunk,
        slot=0,
        queued_ns=1,
    )


def make_pusher(emit: Callable[[PartPushed], None], failpoints: str = "") -> Pusher:
    """One whose memory is nobody's."""
    points = parse_failpoints(failpoints)
    plane = FakeDataPlane(FakeNetwork(), peer_id="p", incarnation="i", now=CLOCK.monotonic)
    return Pusher(
        rank=0,
        region=plane.allocate(64, 1),
        clock=CLOCK,
        emit=emit,
        faults=PushFaults(points, plane),
        shaper=LinkShaper(points),
    )


class Reports:
    """What a pusher says, in turn."""

    def __init__(self, patience_s: float) -> None:
        self._queue: SimpleQueue[PartPushed] = SimpleQueue()
        self._patience_s = patience_s
        self.put = self._queue.put

    def next(self) -> PartPushed:
        """The next report; waits for it."""
        return self._queue.get(timeout=self._patience_s)

    def all(self) -> list[PartPushed]:
        """What has been said and not been looked at."""
        found = []
        while not self._queue.empty():
            found.append(self._queue.get())
        return found
