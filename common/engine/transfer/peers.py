"""The peers of a rank: their layouts while a link is being made, then the compiled copies and connections of those it pushes to."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from common.dataplane.port import DataPlane, RemoteRegion
from common.layout.part_copies import PartCopies
from common.layout.planner import plan
from common.layout.replicas import split_replicas
from common.layout.templates import CopyTemplate
from common.runtime.clock import Clock
from contracts.dataplane import RegionDescriptor
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, PlannedPart, RankManifest, Role
from contracts.rank import AddPeerRank, PeerSide

CONNECT_TIMEOUT_S: Final = 10.0
"""How long a rank may take to reach all regions of a peer."""

CacheKey = tuple[Namespace, Role, int]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One replica of a linked worker. `templates` are all that this rank owes, `parts` the same for a layer's cache; regions are by destination rank.

    `lost` says of which write to it nobody knows the end: nothing more is written over this link, which its worker undoes. At most one
    thread writes to a peer.
    """

    templates: tuple[CopyTemplate, ...]
    parts: dict[CacheKey, tuple[PartCopies, ...]]
    regions: dict[int, RemoteRegion]
    num_blocks: int
    num_slots: int
    lost: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the replica's regions."""
        for region in self.regions.values():
            region.close()


@dataclass(kw_only=True)
class PeerDraft:
    """A link to come: what its ranks said so far."""

    sides: dict[PeerSide, list[RankManifest]] = field(default_factory=lambda: {side: [] for side in PeerSide})
    regions: dict[tuple[PeerSide, int, int], RegionDescriptor | None] = field(default_factory=dict)

    def add(self, command: AddPeerRank) -> None:
        """Remember one rank."""
        self.sides[command.side].append(command.manifest)
        at = command.manifest.coordinates
        self.regions[command.side, at.dp_rank, at.tp_rank] = command.region

    def region_of(self, side: PeerSide, dp_rank: int, rank: int) -> RegionDescriptor:
        """Where a rank of the peer can be reached. Raises `InvalidValueError` when it has no region."""
        descriptor = self.regions[side, dp_rank, rank]
        if descriptor is None:
            field = f"region of rank {rank} in replica {dp_rank}"
            raise InvalidValueError(field=field, value=None, rule="a region that can be reached")
        return descriptor

    def connect_replicas(
        self,
        side: PeerSide,
        num_replicas: int,
        ranks: Iterable[int],
        *,
        data_plane: DataPlane,
        clock: Clock,
        stop: threading.Event,
    ) -> tuple[dict[int, RemoteRegion], ...]:
        """Connect to the regions of these ranks of the peer in each of its replicas, in order: by rank.

        Blocks, and raises, as `connect` does; then nothing is left open.
        """
        deadline = clock.monotonic() + CONNECT_TIMEOUT_S
        found: list[dict[int, RemoteRegion]] = []
        with ExitStack() as opened:
            for dp_rank in range(num_replicas):
                found.append({})
                for rank in ranks:
                    region = data_plane.connect(self.region_of(side, dp_rank, rank), deadline, stop)
                    opened.callback(region.close)
                    found[-1][rank] = region
            opened.pop_all()
        return tuple(found)

    def connect(self, own_rank: int, data_plane: DataPlane, clock: Clock, stop: threading.Event) -> tuple[Peer, ...]:
        """Compile the plan and connect to the regions that this rank writes to: the replicas of the peer, in order.

        Blocks for up to `CONNECT_TIMEOUT_S`, or until `stop` is set. Raises `PlanRefusedError`, `DataPlaneError`, or
        `InvalidValueError` for a destination that has no region; then nothing is left open.
        """
        replicas = split_replicas("destination", self.sides[PeerSide.DESTINATION])
        # All replicas are laid out alike: one plan serves every one of them.
        compiled = plan(self.sides[PeerSide.SOURCE], replicas[0])
        templates = tuple(compiled.templates_for(own_rank))
        parts: dict[CacheKey, dict[PlannedPart, list[CopyTemplate]]] = {}
        for template in templates:
            part = template.part
            parts.setdefault((part.namespace, part.role, part.layer), {}).setdefault(part, []).append(template)
        owed = {key: tuple(PartCopies(part, found) for part, found in held.items()) for key, held in parts.items()}
        dst_ranks = sorted({template.part.dst_rank for template in templates})
        connected = self.connect_replicas(
            PeerSide.DESTINATION, len(replicas), dst_ranks, data_plane=data_plane, clock=clock, stop=stop
        )
        return tuple(
            Peer(
                templates=templates,
                parts=owed,
                regions=regions,
                num_blocks=manifests[0].num_blocks,
                num_slots=manifests[0].num_slots,
            )
            for manifests, regions in zip(replicas, connected, strict=True)
        )
