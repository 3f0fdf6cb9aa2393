"""The peers that a rank may push to: their layouts while a link is being made, then the compiled copies and connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.dataplane.port import DataPlane, RemoteRegion
from common.layout.part_copies import PartCopies
from common.layout.planner import plan
from common.layout.replicas import split_replicas
from common.layout.templates import CopyTemplate
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, PlannedPart, RankManifest, Role
from contracts.rank import AddPeerRank, PeerSide
from contracts.requests import WorkerRef

CONNECT_TIMEOUT_S: Final = 10.0

CacheKey = tuple[Namespace, Role, int]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One replica of a linked worker. `parts` are what this rank owes for a layer's cache; regions are by destination rank."""

    parts: dict[CacheKey, tuple[PartCopies, ...]]
    regions: dict[int, RemoteRegion]
    num_blocks: int
    num_slots: int

    def close(self) -> None:
        """Let go of the replica's regions."""
        for region in self.regions.values():
            region.close()


@dataclass(kw_only=True)
class _Draft:
    sides: dict[PeerSide, list[RankManifest]] = field(default_factory=lambda: {side: [] for side in PeerSide})
    regions: dict[tuple[int, int], RegionDescriptor | None] = field(default_factory=dict)


class PeerTable:
    """The links of one rank, the source of every push, with every replica of each linked worker. Used by the rank's thread."""

    def __init__(self, rank: int, data_plane: DataPlane) -> None:
        self._rank = rank
        self._data_plane = data_plane
        self._drafts: dict[WorkerRef, _Draft] = {}
        self._peers: dict[WorkerRef, tuple[Peer, ...]] = {}

    def find(self, worker: WorkerRef, dp_rank: int) -> Peer:
        """One replica of a linked worker. Raises `InvalidValueError` when there is none."""
        peers = self._peers.get(worker)
        if peers is None:
            shown = f"{worker.worker_id} {worker.incarnation}"
            raise InvalidValueError(field="push.grant", value=shown, rule="a start of a worker that is linked")
        if not 0 <= dp_rank < len(peers):
            rule = f"a replica of {worker.worker_id}: 0 to {len(peers) - 1}"
            raise InvalidValueError(field="push.grant.dp_rank", value=dp_rank, rule=rule)
        return peers[dp_rank]

    def add(self, command: AddPeerRank) -> None:
        """Remember one rank's layout for a link to come."""
        draft = self._drafts.setdefault(command.peer, _Draft())
        draft.sides[command.side].append(command.manifest)
        if command.side is PeerSide.DESTINATION:
            at = command.manifest.coordinates
            draft.regions[at.dp_rank, at.tp_rank] = command.region

    def link(self, worker: WorkerRef, deadline: float) -> None:
        """Compile the plan and connect to the regions that this rank writes to, in place of an earlier link.

        Raises `PlanRefusedError`, `DataPlaneError`, or `InvalidValueError` for a destination that has no region. Whatever comes of it,
        the layouts are forgotten.
        """
        draft = self._drafts.pop(worker, _Draft())
        replicas = split_replicas("destination", draft.sides[PeerSide.DESTINATION])
        # All replicas are laid out alike: one plan serves every one of them.
        compiled = plan(draft.sides[PeerSide.SOURCE], replicas[0])
        parts: dict[CacheKey, dict[PlannedPart, list[CopyTemplate]]] = {}
        for template in compiled.templates_for(self._rank):
            part = template.part
            parts.setdefault((part.namespace, part.role, part.layer), {}).setdefault(part, []).append(template)
        owed = {key: tuple(PartCopies(part, found) for part, found in held.items()) for key, held in parts.items()}
        dst_ranks = sorted({template.part.dst_rank for template in compiled.templates_for(self._rank)})
        peers: list[Peer] = []
        try:
            for dp_rank, manifests in enumerate(replicas):
                regions: dict[int, RemoteRegion] = {}
                first = manifests[0]
                # The peer is kept before it is connected: whatever fails, what is open by then gets closed.
                peers.append(Peer(parts=owed, regions=regions, num_blocks=first.num_blocks, num_slots=first.num_slots))
                for rank in dst_ranks:
                    descriptor = _reachable(dp_rank, rank, draft.regions[dp_rank, rank])
                    regions[rank] = self._data_plane.connect(descriptor, deadline)
        except BaseException:
            for peer in peers:
                peer.close()
            raise
        self.unlink(worker)
        self._peers[worker] = tuple(peers)

    def unlink(self, worker: WorkerRef) -> None:
        """Forget a peer, linked or half added. Idempotent."""
        self._drafts.pop(worker, None)
        for peer in self._peers.pop(worker, ()):
            peer.close()

    def close(self) -> None:
        """Forget all peers."""
        for worker in (*self._peers, *self._drafts):
            self.unlink(worker)


def _reachable(dp_rank: int, rank: int, descriptor: RegionDescriptor | None) -> RegionDescriptor:
    if descriptor is None:
        field = f"region of rank {rank} in replica {dp_rank}"
        raise InvalidValueError(field=field, value=None, rule="a region that can be reached")
    return descriptor
