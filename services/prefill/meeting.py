"""Meeting a decode worker: it describes its ranks, both sides are compared, and the plan between them is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from common.bus.port import Bus
from common.layout.link import mismatches
from common.layout.planner import ReshardPlan
from common.layout.refusal import Mismatch, PlanRule, WorkersDifferError
from common.layout.replicas import plan_workers
from common.layout.templates import PagedTemplate, SlotTemplate
from common.runtime.clock import Clock, Deadline
from common.runtime.offload import Offload
from common.worker.describing import describe_worker
from contracts.dataplane import RegionDescriptor
from contracts.manifest import RankManifest, Topology
from contracts.rank import RankStarted
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription, WorkerRole
from services.prefill.core.pair import Terms

MEETING_S: Final = 10.0
_NO_TRANSPORT: Final = "none"

_Side = Sequence[tuple[RankManifest, RegionDescriptor | None]]


class MetPeer(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker that fits: what its ranks said, and the plan from any replica here to any replica there."""

    ranks: tuple[WorkerDescription, ...]
    plan: ReshardPlan
    terms: Terms


class Meetings:
    """Meets decode workers over the bus. `own` are the ranks of all replicas of this worker; `offload` compiles plans."""

    def __init__(self, bus: Bus, clock: Clock, own: Sequence[RankStarted], offload: Offload) -> None:
        self._bus = bus
        self._clock = clock
        self._offload = offload
        self._own = tuple((rank.manifest, rank.region) for rank in own)

    async def meet(self, peer: WorkerRef) -> MetPeer:
        """Meet one start of a decode worker, within `MEETING_S`.

        Raises `PlanRefusedError` for one that does not fit, naming the rule; DEADLINE_EXCEEDED, INCARNATION_CHANGED, `BusError`
        or `CodecError` when it could not be found out.
        """
        ranks = await describe_worker(self._bus, WorkerRole.DECODE, peer, Deadline.after(self._clock, MEETING_S))
        # A tenth of a second for a large model: prompts, grants and reports of others go on meanwhile.
        met: MetPeer = await self._offload(lambda: compare(self._own, ranks))
        return met


def compare(own: _Side, ranks: tuple[WorkerDescription, ...]) -> MetPeer:
    """What a decode worker that described itself is to us. Raises `PlanRefusedError` for one that does not fit."""
    theirs = [(rank.manifest, rank.region) for rank in ranks]
    check(own, theirs)
    plan = plan_workers([manifest for manifest, _ in own], [manifest for manifest, _ in theirs])
    return MetPeer(ranks=ranks, plan=plan, terms=terms_of(plan, _transports(own)))


def check(source: _Side, destination: _Side) -> None:
    """Raise `WorkersDifferError` naming every field that must be equal on both sides and is not. Topologies are the planner's."""
    ours, theirs = source[0][0], destination[0][0]
    found: list[Mismatch] = []
    if ours.schema_version != theirs.schema_version:
        found.append(
            Mismatch(
                rule=PlanRule.SCHEMA_VERSION,
                field="schema_version",
                source=ours.schema_version,
                destination=theirs.schema_version,
                remedy="run the same release on both",
            )
        )
    found += mismatches(ours.fingerprint, theirs.fingerprint)
    here, there = _transports(source), _transports(destination)
    if here != there:
        found.append(
            Mismatch(
                rule=PlanRule.TRANSPORT,
                field="transport",
                source=here,
                destination=there,
                remedy="set transport alike",
            )
        )
    if found:
        raise WorkersDifferError(found)


def terms_of(plan: ReshardPlan, transport: str) -> Terms:
    """What people see of a plan."""
    paged_bytes: dict[int, int] = {}  # by modulus: a part with modulus m moves every m-th block
    state_bytes = 0
    for template in plan.templates:
        match template:
            case PagedTemplate(part=part):
                nbytes = template.piece.length * template.token_bytes
                paged_bytes[part.modulus] = paged_bytes.get(part.modulus, 0) + nbytes
            case SlotTemplate():
                state_bytes += template.nbytes
    source, destination = (side.fingerprint.topology for side in (plan.source, plan.destination))
    return Terms(
        topology=f"{_shown(source)} -> {_shown(destination)}",
        transport=transport,
        num_parts=len(plan.parts),
        token_bytes=sum(nbytes // modulus for modulus, nbytes in paged_bytes.items()),
        state_bytes=state_bytes,
        has_drafts=plan.has_drafts,
        why_no_drafts=plan.why_no_drafts,
    )


def _transports(side: _Side) -> str:
    found = {_NO_TRANSPORT if region is None else region.transport for _, region in side}
    return "+".join(sorted(found))


def _shown(topology: Topology) -> str:
    sizes = (("dp", topology.dp_size), ("tp", topology.tp_size), ("dcp", topology.dcp_size))
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "tp")
