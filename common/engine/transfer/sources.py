"""The sources that a rank may pull from: the compiled copies and connections of one link."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from common.dataplane.port import DataPlane, RemoteRegion
from common.engine.transfer.peers import PeerDraft
from common.layout.part_copies import PartCopies
from common.layout.planner import plan
from common.layout.replicas import split_replicas
from common.layout.staging import STAGED_ROLES, StagedStates
from common.layout.templates import CopyTemplate
from common.runtime.clock import Clock
from contracts.manifest import PlannedPart
from contracts.rank import PeerSide


@dataclass(frozen=True, kw_only=True)
class Source:
    """One replica of a linked source worker.

    By source rank: its region, and `direct`, the parts that it holds for this rank and that are read straight into their places:
    KEY, VALUE and BOOTSTRAP. `states` are the parts of CONV and SSM from all source ranks, as they lie in a staging row.
    """

    regions: dict[int, RemoteRegion]
    direct: dict[int, tuple[PartCopies, ...]]
    states: StagedStates
    num_blocks: int
    num_slots: int

    def close(self) -> None:
        """Let go of the replica's regions."""
        for region in self.regions.values():
            region.close()


def connect_sources(
    draft: PeerDraft, own_rank: int, data_plane: DataPlane, clock: Clock, stop: threading.Event
) -> tuple[Source, ...]:
    """Compile the plan from the peer of `draft`, and connect to the regions that this rank reads: the peer's replicas, in order.

    Blocks, and raises, as `PeerDraft.connect` does.
    """
    replicas = split_replicas(PeerSide.SOURCE.value, draft.sides[PeerSide.SOURCE])
    # All replicas are laid out alike: one plan serves every one of them.
    templates = plan(replicas[0], draft.sides[PeerSide.DESTINATION]).templates_into(own_rank)
    direct = _direct_of(templates)
    states = StagedStates(templates)
    src_ranks = sorted({template.part.src_rank for template in templates})
    connected = draft.connect_replicas(
        PeerSide.SOURCE, len(replicas), src_ranks, data_plane=data_plane, clock=clock, stop=stop
    )
    return tuple(
        Source(
            regions=regions,
            direct=direct,
            states=states,
            num_blocks=manifests[0].num_blocks,
            num_slots=manifests[0].num_slots,
        )
        for manifests, regions in zip(replicas, connected, strict=True)
    )


def _direct_of(templates: tuple[CopyTemplate, ...]) -> dict[int, tuple[PartCopies, ...]]:
    by_part: dict[PlannedPart, list[CopyTemplate]] = {}
    for template in templates:
        if template.part.role not in STAGED_ROLES:
            by_part.setdefault(template.part, []).append(template)
    found: dict[int, list[PartCopies]] = {}
    for part, held in by_part.items():
        found.setdefault(part.src_rank, []).append(PartCopies(part, held))
    return {rank: tuple(copies) for rank, copies in found.items()}
