"""The peers that a rank may push to: their layouts while a link is being made, then the compiled copies and connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.dataplane.port import DataPlane, RemoteRegion
from common.layout.part_copies import PartCopies
from common.layout.planner import plan
from common.layout.templates import CopyTemplate
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError
from contracts.manifest import PlannedPart, RankManifest, Role
from contracts.rank import AddPeerRank, PeerSide
from contracts.requests import WorkerRef

CONNECT_TIMEOUT_S: Final = 10.0

CacheKey = tuple[Role, int]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A linked worker. `parts` are what this rank owes for a (role, layer); regions are by destination rank."""

    parts: dict[CacheKey, tuple[PartCopies, ...]]
    regions: dict[int, RemoteRegion]
    num_blocks: int
    num_slots: int

    def close(self) -> None:
        """Let go of the peer's regions."""
        for region in self.regions.values():
            region.close()


@dataclass(kw_only=True)
class _Draft:
    sides: dict[PeerSide, list[RankManifest]] = field(default_factory=lambda: {side: [] for side in PeerSide})
    regions: dict[int, RegionDescriptor | None] = field(default_factory=dict)


class PeerTable:
    """The links of one rank, the source of every push. Used by the rank's thread."""

    def __init__(self, rank: int, data_plane: DataPlane) -> None:
        self._rank = rank
        self._data_plane = data_plane
        self._drafts: dict[WorkerRef, _Draft] = {}
        self._peers: dict[WorkerRef, Peer] = {}

    def find(self, worker: WorkerRef) -> Peer:
        """The linked peer. Raises `InvalidValueError` when there is none."""
        peer = self._peers.get(worker)
        if peer is None:
            shown = f"{worker.worker_id} {worker.incarnation}"
            raise InvalidValueError(field="push.grant", value=shown, rule="a start of a worker that is linked")
        return peer

    def add(self, command: AddPeerRank) -> None:
        """Remember one rank's layout for a link to come."""
        draft = self._drafts.setdefault(command.peer, _Draft())
        draft.sides[command.side].append(command.manifest)
        if command.side is PeerSide.DESTINATION:
            draft.regions[command.manifest.coordinates.tp_rank] = command.region

    def link(self, worker: WorkerRef, deadline: float) -> None:
        """Compile the plan and connect to the regions that this rank writes to, in place of an earlier link.

        Raises `PlanRefusedError`, `DataPlaneError`, or `InvalidValueError` for a destination that has no region. Whatever comes of it,
        the layouts are forgotten.
        """
        draft = self._drafts.pop(worker, _Draft())
        destination = draft.sides[PeerSide.DESTINATION]
        compiled = plan(draft.sides[PeerSide.SOURCE], destination)
        parts: dict[CacheKey, dict[PlannedPart, list[CopyTemplate]]] = {}
        for template in compiled.templates_for(self._rank):
            part = template.part
            parts.setdefault((part.role, part.layer), {}).setdefault(part, []).append(template)
        regions: dict[int, RemoteRegion] = {}
        try:
            for rank in sorted({template.part.dst_rank for template in compiled.templates_for(self._rank)}):
                regions[rank] = self._data_plane.connect(_reachable(rank, draft.regions[rank]), deadline)
        except BaseException:
            for region in regions.values():
                region.close()
            raise
        self.unlink(worker)
        self._peers[worker] = Peer(
            parts={key: tuple(PartCopies(part, found) for part, found in held.items()) for key, held in parts.items()},
            regions=regions,
            num_blocks=destination[0].num_blocks,
            num_slots=destination[0].num_slots,
        )

    def unlink(self, worker: WorkerRef) -> None:
        """Forget a peer, linked or half added. Idempotent."""
        self._drafts.pop(worker, None)
        peer = self._peers.pop(worker, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Forget all peers."""
        for worker in (*self._peers, *self._drafts):
            self.unlink(worker)


def _reachable(rank: int, descriptor: RegionDescriptor | None) -> RegionDescriptor:
    if descriptor is None:
        raise InvalidValueError(field=f"region of rank {rank}", value=None, rule="a region that can be reached")
    return descriptor
