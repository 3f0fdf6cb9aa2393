"""All replicas of a worker: which of them takes new work, what they have together, and their links with other workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

from common.engine.port import Engine, EngineError, EngineInfo
from common.layout.replicas import split_replicas
from common.worker.core.blocks import MemoryNeed, Reservation
from common.worker.core.growth import Growth
from common.worker.core.replica_choice import ReplicaLoad, choose_for_memory, choose_for_prompt
from common.worker.core.scheduler import StepLimits
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import StepObserver
from common.worker.replica import Replica, StartedEngine
from common.worker.waiting_line import WaitingLine
from contracts.manifest import RankManifest
from contracts.rank import RankStarted
from contracts.requests import WorkerRef
from contracts.workers import ReplicaRoom, WorkerDescription, WorkerLoad


class ReplicaSet:
    """Replicas in the order of their dp rank.

    Raises `PlanRefusedError` when they are not all replicas of one worker, laid out alike: then no peer could plan against it.
    """

    def __init__(
        self,
        started: Iterable[StartedEngine],
        limits: StepLimits,
        observer: StepObserver,
        *,
        release_timeout_ms: int,
        growth: Growth | None = None,
    ) -> None:
        self.growth = growth or Growth()
        replicas = [
            Replica(each, limits, observer, release_timeout_ms=release_timeout_ms, growth=self.growth)
            for each in started
        ]
        self._replicas = tuple(sorted(replicas, key=lambda replica: replica.dp_rank))
        split_replicas("worker", self.manifests)
        self.line = WaitingLine(self.reserve)
        self._attempts: dict[WorkerRef, object] = {}
        """The newest attempt to link with each peer, while it is under way."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, dp_rank: int) -> Replica:
        return self._replicas[dp_rank]

    @property
    def info(self) -> EngineInfo:
        """What every replica is: they differ in `ranks` alone, which are those of replica 0 here."""
        return self._replicas[0].info

    @property
    def ranks(self) -> tuple[RankStarted, ...]:
        """The ranks of all replicas: rank `dp_rank * tp + tp_rank` is rank `tp_rank` of replica `dp_rank`."""
        return tuple(rank for replica in self._replicas for rank in replica.info.ranks)

    @property
    def manifests(self) -> tuple[RankManifest, ...]:
        """The layouts of all ranks."""
        return tuple(rank.manifest for rank in self.ranks)

    @property
    def load(self) -> WorkerLoad:
        """What all replicas have left and are doing together, and what each of several has left."""
        loads = [replica.load for replica in self._replicas]
        return WorkerLoad(
            num_free_blocks=sum(load.num_usable_blocks for load in loads),
            num_free_slots=sum(load.num_free_slots for load in loads),
            num_waiting=sum(load.num_waiting for load in loads) + len(self.line),
            num_running=sum(load.num_running for load in loads),
            num_kept_blocks=sum(load.num_kept_blocks for load in loads),
            replicas=tuple(_room_of(load) for load in loads) if len(loads) > 1 else (),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of all replicas."""
        return sum(replica.pool.num_blocks for replica in self._replicas)

    @property
    def num_slots(self) -> int:
        """Slots of all replicas."""
        return sum(replica.pool.num_slots for replica in self._replicas)

    def of(self, sequence: Sequence) -> Replica:
        """The replica in which a sequence lives."""
        return self._replicas[sequence.dp_rank]

    def reserve(self, need: MemoryNeed) -> tuple[Replica, Reservation] | None:
        """Take what is needed in the emptiest replica that has it; None, and nothing taken, when none has room."""
        num_blocks = self._replicas[0].pool.num_blocks_for(need.num_tokens)
        chosen = choose_for_memory((replica.load for replica in self._replicas), num_blocks)
        if chosen is None:
            return None
        memory = self._replicas[chosen].pool.reserve(need)
        return None if memory is None else (self._replicas[chosen], memory)

    def for_prompt(self, num_tokens: int) -> Replica:
        """The replica that shall compute a prompt whose sequence takes `num_tokens` of memory there."""
        num_blocks = self._replicas[0].pool.num_blocks_for(num_tokens)
        return self._replicas[choose_for_prompt((replica.load for replica in self._replicas), num_blocks)]

    async def link(self, peer: WorkerRef, ranks: Iterable[WorkerDescription]) -> None:
        """Link every replica here with every replica of `peer`, given all of its ranks; in place of an earlier link.

        Raises `EngineError` with the rule that forbids it; then no replica is linked.
        """
        described = tuple(ranks)
        # Without the loop's lock: prompts and other peers do not wait for this one.
        await self._link(peer, lambda engine: engine.link(peer, described))

    async def link_source(self, peer: WorkerRef, ranks: Iterable[WorkerDescription]) -> None:
        """Let every replica here read from every replica of `peer`, given all of its ranks. Otherwise like `link`."""
        described = tuple(ranks)
        await self._link(peer, lambda engine: engine.link_source(peer, described))

    async def _link(self, peer: WorkerRef, make: Callable[[Engine], Awaitable[None]]) -> None:
        attempt = self._attempts[peer] = object()

        def is_replaced() -> bool:
            return self._attempts.get(peer) is not attempt

        try:
            for replica in self._replicas:
                await make(replica.engine)
        except EngineError:
            await self.unlink(peer, is_wanted=is_replaced)
            raise
        finally:
            if not is_replaced():
                del self._attempts[peer]

    async def unlink(self, peer: WorkerRef, *, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Forget a peer on every replica. Twice is fine.

        It waits for the turn of each replica, and the peer may be linked anew meanwhile: where it `is_wanted` then, it stays linked.
        """
        for replica in self._replicas:
            async with replica.loop.lock:
                if not is_wanted():
                    await replica.engine.unlink(peer)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block and slot of every replica is in exactly one place."""
        for replica in self._replicas:
            replica.pool.check_integrity()

    def has_quarantined(self, handoff_id: str) -> bool:
        """Whether memory of a handoff is in quarantine, in any replica."""
        return any(replica.loop.has_quarantined(handoff_id) for replica in self._replicas)

    async def retry_quarantine(self, replica: Replica) -> None:
        """See `EngineLoop.retry_quarantine`. Who waits for memory may have what came back."""
        await replica.loop.retry_quarantine()
        self.line.serve()


def _room_of(load: ReplicaLoad) -> ReplicaRoom:
    return ReplicaRoom(
        num_free_blocks=load.num_usable_blocks, num_free_slots=load.num_free_slots, num_kept_blocks=load.num_kept_blocks
    )
