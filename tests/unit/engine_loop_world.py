"""An engine loop over a fake engine, in virtual time, with a pool that is too small for its two sequences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineError, StepResult
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.core.blocks import BlockPool, Reservation
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Produced, Scheduler, StepLimits
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import EngineLoop, StepOutcome
from contracts.errors import ErrorInfo
from contracts.rank import ExtendSequences, StepPlan
from contracts.requests import SamplingParams

BLOCK = 4


class SlowEngine(FakeEngine):
    """A fake engine whose releases let something happen first, and whose answers can be told to be bad."""

    meanwhile: Callable[[], None] | None = None
    writers_left = 0
    failing_releases = 0
    refuses = False
    bad_logits: frozenset[int] = frozenset()

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Take a while."""
        if self.meanwhile is not None:
            self.meanwhile()
        if self.failing_releases:
            self.failing_releases -= 1
            raise EngineError("rank 0: cannot revoke")
        if self.writers_left:
            self.writers_left -= 1
            return frozenset(seqs)
        return await super().release(seqs, generation, timeout_ms)

    async def extend(self, command: ExtendSequences) -> None:
        """Refuse, if told."""
        if self.refuses:
            raise EngineError("rank 0: no")
        await super().extend(command)

    async def step(self, plan: StepPlan) -> StepResult:
        """Give no token to those whose logits are bad."""
        result = await super().step(plan)
        failed = tuple(item.seq for item in plan.items if item.seq in self.bad_logits)
        tokens = tuple(token for token in result.tokens if token.seq not in failed)
        return msgspec.structs.replace(result, tokens=tokens, failed=failed)


class World:
    """Two sequences in a pool that cannot hold both to their end. It observes the loop."""

    def __init__(self, clock: VirtualClock, num_blocks: int = 5) -> None:
        self.engine = SlowEngine(clock, worker_id="w", incarnation="i", block_size=BLOCK, num_blocks=num_blocks)
        self.pool = BlockPool(num_blocks=num_blocks, num_slots=4, block_size=BLOCK)
        limits = StepLimits(max_step_tokens=64, prefill_chunk_tokens=64)
        growth = Growth(reserve_output_tokens=1, step_blocks=1)
        self.scheduler = Scheduler(self.pool, limits, growth)
        self.loop = EngineLoop(self.engine, self.pool, self.scheduler, self, release_timeout_ms=100)
        self.heard: list[tuple[str, int]] = []
        self.quarantines: list[tuple[str, str, int]] = []
        self.produced: tuple[Produced, ...] = ()
        self.older, self.younger = (self._sequence(seq) for seq in (1, 2))

    def _sequence(self, seq: int) -> Sequence:
        sequence = Sequence(
            seq=seq,
            handoff_id=f"h{seq}",
            request_id=f"r{seq}",
            attempt=0,
            router_id="router-0",
            num_prompt_tokens=4,
            sampling=SamplingParams(max_tokens=12, seed=seq),
            prompt_ids=(5, 6, 7, 8),
        )
        self.scheduler.enqueue(sequence)
        return sequence

    async def advance_until_short(self) -> None:
        """The next turn is the one in which both need a block and one is left."""
        for _ in range(5):
            assert await self.loop.advance()

    async def bound(self, sequence: Sequence) -> None:
        """See `StepObserver.bound`."""
        self.heard.append(("bound", sequence.seq))

    async def stepped(self, outcome: StepOutcome) -> None:
        """See `StepObserver.stepped`."""
        self.produced = outcome.produced

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """See `StepObserver.failed`."""
        self.heard += [(error.message, sequence.seq) for sequence in sequences]

    async def preempted(self, sequence: Sequence) -> None:
        """See `StepObserver.preempted`."""
        self.heard.append(("preempted", sequence.seq))

    def released(self, *, quarantined: bool) -> None:
        """See `StepObserver.released`."""
        owned = () if self.older.memory is None else self.older.memory.block_ids
        self.heard.append(("quarantined" if quarantined else "released", len(owned)))

    def quarantined(self, sequence: Sequence, memory: Reservation) -> None:
        """See `StepObserver.quarantined`."""
        self.quarantines.append(("began", sequence.handoff_id, memory.slot))

    def quarantine_ended(self, handoff_id: str, memory: Reservation) -> None:
        """See `StepObserver.quarantine_ended`."""
        self.quarantines.append(("ended", handoff_id, memory.slot))

    def release_failed(self, sequence: Sequence, error: ErrorInfo) -> None:
        """See `StepObserver.release_failed`."""
        self.heard.append((error.message, sequence.seq))


def in_world(scenario: Callable[[World], Awaitable[None]], **changes: int) -> None:
    """Run a scenario in virtual time."""

    async def main(clock: VirtualClock) -> None:
        await scenario(World(clock, **changes))

    run_virtual(main)
