"""Links with decode workers: each that registers is met, and linked or refused; each that drains or dies is unlinked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never

from common.bus.heard import HeardTable
from common.bus.port import Bucket, Bus, Entry, Snapshot
from common.bus.refusals import Refusals
from common.bus.storage import WORKER_TTL_S, ttl_on
from common.engine.port import EngineDeadError
from common.layout.refusal import PlanRefusedError
from common.runtime.clock import Clock, Deadline, wall_text
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.offload import Offload
from common.runtime.tasks import BoundedTasks
from common.worker.last_look import take_gone
from common.worker.replica_set import ReplicaSet
from contracts import subjects
from contracts.errors import ErrorCode, PdmeshError
from contracts.links import LinkRecord, LinkState
from contracts.rank import PartPushed
from contracts.requests import WorkerRef
from contracts.workers import WorkerRecord, WorkerRole, WorkerState
from services.prefill.core.pair import Pair, Phase, Refusal
from services.prefill.core.pair_events import (
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    Doubted,
    Meet,
    Met,
    OwnDrain,
    PairEvent,
    PairRefused,
    PeerLost,
    PeerSeen,
    Tell,
    Tick,
    TryFailed,
)
from services.prefill.core.pair_step import step
from services.prefill.core.transfers import Transfers
from services.prefill.link_observer import LinkObserver
from services.prefill.link_table import LinkTable
from services.prefill.meeting import Meetings, MetPeer
from services.prefill.reachability import knock

MAX_PEERS: Final = 1024
"""Decode workers that a prefill worker deals with; one more is passed over and logged."""

_TICK_S: Final = 0.5
_ENGINE: Final = "engine"
_MAX_REASON_CHARS: Final = 1000


@dataclass(kw_only=True)
class _Peer:
    """One decode worker: the pair, since when it is in its phase, and what its present start said when it was met."""

    pair: Pair
    since: str
    met: MetPeer | None = None


@dataclass(kw_only=True)
class LinkPorts:
    """What links need of the process that they live in."""

    own: WorkerRef
    bus: Bus
    clock: Clock
    log: Log
    metrics: Metrics
    refusals: Refusals
    group: asyncio.TaskGroup
    replicas: ReplicaSet
    offload: Offload = asyncio.to_thread
    max_peers: int = MAX_PEERS


class Links:
    """Every decode worker that is known, by id. What becomes of a pair is decided by `services.prefill.core.pair_step`.

    Meetings go on side by side, so that a worker that does not answer holds up no other. `PD_LINKS` tells everybody how the
    pairs stand.
    """

    def __init__(self, ports: LinkPorts) -> None:
        self._own = ports.own
        self._bus = ports.bus
        self._clock = ports.clock
        self._log = ports.log
        self._refusals = ports.refusals
        self._replicas = ports.replicas
        self._max_peers = ports.max_peers
        self._meetings = Meetings(ports.bus, ports.clock, ports.replicas.ranks, ports.offload)
        self._observer = LinkObserver(ports.own, ports.bus, ports.clock, ports.log, ports.metrics)
        self._observer.watch(self._count)
        self._table = LinkTable(ports.bus, ports.clock, ports.log, ports.own.worker_id, self._records)
        # One thing is done for a pair at a time, and the one before may not have been taken from the list yet.
        self._tasks = BoundedTasks(ports.group, name="link", limit=2 * ports.max_peers)
        self._heard: HeardTable[WorkerRecord] = HeardTable(ttl_s=ttl_on(ports.bus, WORKER_TTL_S))
        self._reconnects = ports.bus.reconnects
        self._peers: dict[str, _Peer] = {}
        self._transfers = Transfers()
        self._is_closed = False
        self._changed = asyncio.Event()

    # For handoffs.

    def met(self, worker_id: str, incarnation: str) -> MetPeer | None:
        """One start of a decode worker and the plan to it, or None when nothing can be written to it.

        There is one while the link waits for its last transfers, too: a grant from before the drain is still good.
        """
        peer = self._peers.get(worker_id)
        if peer is None or peer.met is None or peer.pair.incarnation != incarnation or not peer.pair.may_transfer:
            return None
        return peer.met

    def why_no_plan(self, worker_id: str) -> str:
        """How it stands with a decode worker, in words."""
        peer = self._peers.get(worker_id)
        if peer is None:
            return "it is not known here"
        refusal = peer.pair.refusal
        start = f"{peer.pair.phase} {peer.pair.incarnation}".strip()
        return start if refusal is None else f"{start}: {refusal.reason}"

    def transfer_begins(self, handoff_id: str, peer: WorkerRef, dp_rank: int = 0) -> None:
        """Note that a handoff will write to a peer: its link is not undone before `transfer_ends`, while the peer lives."""
        self._transfers.begins(handoff_id, peer, dp_rank)

    def transfer_bound(self, handoff_id: str) -> None:
        """Note that the ranks have found the link of a handoff: what comes of it says nothing of a later one."""
        self._transfers.bound(handoff_id, self._clock.monotonic_ns())

    def transfer_ends(self, handoff_id: str) -> None:
        """Note that nothing is written for a handoff any more. Twice is fine."""
        peer = self._transfers.ends(handoff_id)
        if peer is not None and peer.worker_id in self._peers:
            self._tick(peer.worker_id)

    def note_push(self, own_dp_rank: int, push: PartPushed) -> None:
        """Note what became of a push of one replica. With reason to doubt the link it is undone, and the peer met again."""
        ref = self._transfers.doubted(own_dp_rank, push)
        if ref is not None and ref.worker_id in self._peers:
            text = f"what was pushed to it did not arrive: {push.reason}"[:_MAX_REASON_CHARS]
            self._feed(ref.worker_id, Doubted(at=self._clock.monotonic(), incarnation=ref.incarnation, reason=text))

    # Tasks.

    async def run(self, bucket: Bucket) -> None:
        """Watch who comes, changes and goes."""
        async with await bucket.watch() as watch:
            async for change in watch:
                match change:
                    case Snapshot():
                        pass  # who is not in it falls silent, and silence is judged by `run_ticks`
                    case Entry(deleted=True, key=worker_id):
                        self._lost(worker_id)
                    case Entry():
                        self._see(change)

    async def run_ticks(self, bucket: Bucket) -> None:
        """Notice what silence and time tell: who is gone, what is to be tried again, which link has no transfer left."""
        while True:
            await self._clock.sleep(_TICK_S)
            if not self._bus.is_connected or self._bus.reconnects != self._reconnects:
                self._reconnects = self._bus.reconnects
                self._heard.reconnected(self._clock.monotonic())
            for worker_id in await take_gone(self._heard, bucket, self._clock):
                self._lost(worker_id)
            for worker_id in tuple(self._peers):
                self._tick(worker_id)

    async def run_table(self) -> None:
        """Keep `PD_LINKS` as the pairs are."""
        await self._table.run()

    def close(self) -> None:
        """Meet nobody any more, and undo every link once its last transfer has ended."""
        self._is_closed = True
        for worker_id in tuple(self._peers):
            self._feed(worker_id, OwnDrain(at=self._clock.monotonic()))
            if worker_id in self._peers:
                self._tick(worker_id)

    async def wait_closed(self, deadline: Deadline) -> bool:
        """Wait until no link is left, on the bus either; say whether that was so by the deadline."""
        try:
            async with deadline.timeout():
                while any(peer.pair.phase is not Phase.GONE for peer in self._peers.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return await self._table.wait_written(deadline)

    # What happens.

    def _see(self, entry: Entry) -> None:
        record = self._refusals.record("workers", entry, WorkerRecord, lambda record: record.worker_id)
        if record is None or record.role is not WorkerRole.DECODE:
            return
        if record.worker_id not in self._peers and len(self._peers) >= self._max_peers:
            self._log.error("peer_passed_over", peer=record.worker_id, max_peers=self._max_peers)
            return
        now = self._clock.monotonic()
        self._heard.put(record.worker_id, record, now)
        is_ready = record.state is WorkerState.READY
        self._feed(record.worker_id, PeerSeen(at=now, incarnation=record.incarnation, is_ready=is_ready))

    def _lost(self, worker_id: str) -> None:
        self._heard.delete(worker_id)
        if worker_id in self._peers:
            self._feed(worker_id, PeerLost(at=self._clock.monotonic()))

    def _tick(self, worker_id: str) -> None:
        peer = WorkerRef(worker_id=worker_id, incarnation=self._peers[worker_id].pair.incarnation)
        self._feed(worker_id, Tick(at=self._clock.monotonic(), num_transfers=self._transfers.count(peer)))

    def _feed(self, worker_id: str, event: PairEvent) -> None:
        """One step of one pair."""
        peer = self._peers.get(worker_id)
        if peer is None:
            peer = self._peers[worker_id] = _Peer(pair=Pair(is_closed=self._is_closed), since="")
        before = peer.pair
        peer.pair, effects = step(before, event)
        if (peer.pair.phase, peer.pair.incarnation) != (before.phase, before.incarnation):
            peer.since = wall_text(self._clock)
        if peer.pair.is_forgotten:
            del self._peers[worker_id]
        if peer.pair != before:
            self._changed.set()
            self._table.changed()
        for effect in effects:
            match effect:
                case Tell():
                    self._observer.tell(WorkerRef(worker_id=worker_id, incarnation=effect.incarnation), effect)
                case Meet() | Connect() | Disconnect():
                    if not self._tasks.try_start(partial(self._perform, worker_id, effect)):
                        raise AssertionError("more is being done than there are pairs")
                case _:
                    assert_never(effect)

    # What is done about it.

    async def _perform(self, worker_id: str, effect: Meet | Connect | Disconnect) -> None:
        self._feed(worker_id, await self._outcome(self._peers[worker_id], worker_id, effect))

    async def _outcome(self, peer: _Peer, worker_id: str, effect: Meet | Connect | Disconnect) -> PairEvent:
        incarnation = effect.incarnation
        ref = WorkerRef(worker_id=worker_id, incarnation=incarnation)
        try:
            match effect:
                case Meet():
                    peer.met = await self._meetings.meet(ref)
                    return Met(at=self._clock.monotonic(), incarnation=incarnation, terms=peer.met.terms)
                case Connect():
                    if peer.met is None:
                        raise AssertionError("who is connected was met")
                    await knock(rank.region for rank in peer.met.ranks)
                    await self._replicas.link(ref, peer.met.ranks)
                    self._transfers.linked(ref, self._clock.monotonic_ns())
                    return Connected(at=self._clock.monotonic(), incarnation=incarnation)
                case Disconnect():
                    await self._replicas.unlink(ref)
                    self._transfers.unlinked(ref)
                    return Disconnected(at=self._clock.monotonic(), incarnation=incarnation)
        except EngineDeadError:
            raise  # the worker cannot go on
        except PdmeshError as error:
            return self._failure(effect, error)

    def _failure(self, effect: Meet | Connect | Disconnect, error: PdmeshError) -> PairEvent:
        at, incarnation = self._clock.monotonic(), effect.incarnation
        text = error.message[:_MAX_REASON_CHARS]  # a peer may have written it, and it must fit into a record
        if isinstance(effect, Disconnect):
            self._log.error("unlink_failed", peer_incarnation=incarnation, error_message=text)
            return Disconnected(at=at, incarnation=incarnation)
        if error.code is ErrorCode.INCOMPATIBLE_WORKERS:
            rule = str(error.rule) if isinstance(error, PlanRefusedError) else _ENGINE
            return PairRefused(at=at, incarnation=incarnation, refusal=Refusal(rule=rule, reason=text))
        return TryFailed(at=at, incarnation=incarnation, reason=f"{error.code}: {text}")

    # What people and other services see.

    def _records(self) -> Mapping[str, LinkRecord]:
        return {
            subjects.link_key(self._own.worker_id, worker_id): self._record(worker_id, peer)
            for worker_id, peer in self._peers.items()
            if peer.pair.phase is not Phase.GONE
        }

    def _record(self, worker_id: str, peer: _Peer) -> LinkRecord:
        pair, terms = peer.pair, peer.pair.terms
        return LinkRecord(
            prefill=self._own,
            decode=WorkerRef(worker_id=worker_id, incarnation=pair.incarnation),
            state=LinkState(pair.phase),
            since=peer.since,
            rule="" if pair.refusal is None else pair.refusal.rule,
            reason="" if pair.refusal is None else pair.refusal.reason,
            num_failures=pair.num_failures,
            topology="" if terms is None else terms.topology,
            transport="" if terms is None else terms.transport,
            num_parts=0 if terms is None else terms.num_parts,
            token_bytes=0 if terms is None else terms.token_bytes,
            state_bytes=0 if terms is None else terms.state_bytes,
            has_drafts=terms is not None and terms.has_drafts,
            why_no_drafts="" if terms is None else terms.why_no_drafts[:_MAX_REASON_CHARS],
        )

    def _count(self, state: LinkState) -> int:
        return sum(peer.pair.phase.value == state.value for peer in self._peers.values())
