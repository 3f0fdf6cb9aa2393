"""The engine loop makes room: what may happen while it waits for a release, and when the ranks refuse a growth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineError
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.core.blocks import BlockPool
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence, SequenceState
from common.worker.engine_loop import EngineLoop, StepOutcome
from contracts.errors import ErrorInfo
from contracts.rank import ExtendSequences
from contracts.requests import SamplingParams

BLOCK = 4


class SlowEngine(FakeEngine):
    """A fake engine whose releases let something happen first, and whose answers can be told to be bad."""

    meanwhile: Callable[[], None] | None = None
    writers_left = 0
    refuses = False

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Take a while."""
        if self.meanwhile is not None:
            self.meanwhile()
        if self.writers_left:
            self.writers_left -= 1
            return frozenset(seqs)
        return await super().release(seqs, generation, timeout_ms)

    async def extend(self, command: ExtendSequences) -> None:
        """Refuse, if told."""
        if self.refuses:
            raise EngineError("rank 0: no")
        await super().extend(command)


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


def in_world(scenario: Callable[[World], Awaitable[None]], **changes: int) -> None:
    """Run a scenario in virtual time."""

    async def main(clock: VirtualClock) -> None:
        await scenario(World(clock, **changes))

    run_virtual(main)


def test_those_who_are_short_come_before_those_who_wait() -> None:
    """When it is said that memory is back, the older one has grown already."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.heard.clear()
        assert await world.loop.advance()
        assert world.heard == [("released", 3), ("preempted", 2)]
        assert (world.younger.state, world.scheduler.num_waiting) == (SequenceState.WAITING, 1)

    in_world(scenario)


@pytest.mark.parametrize("writers_left", [0, 2])
def test_who_is_stopped_while_its_memory_is_taken_is_not_computed_again(writers_left: int) -> None:
    """Neither at once nor when its memory has left quarantine."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = writers_left
        world.engine.meanwhile = lambda: world.scheduler.hold(world.younger)
        await world.loop.advance()
        world.engine.meanwhile = None
        for _ in range(3):
            await world.loop.retry_quarantine()
        assert (world.younger.state, world.younger.memory) == (SequenceState.HELD, None)
        assert world.scheduler.num_waiting == 0
        await world.loop.release(world.younger)
        assert world.pool.num_quarantined_blocks == 0

    in_world(scenario)


def test_who_gave_way_into_quarantine_waits_for_its_end() -> None:
    """The ranks know its number until then; whoever is stopped meanwhile does not come back either."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = 2
        await world.loop.advance()
        assert (world.scheduler.num_waiting, world.pool.num_quarantined_blocks) == (0, 2)
        await world.loop.retry_quarantine()
        assert world.scheduler.num_waiting == 0
        await world.loop.retry_quarantine()
        assert (world.scheduler.num_waiting, world.pool.num_quarantined_blocks) == (1, 0)
        while world.older.num_generated_tokens < 12:
            await world.loop.advance()
        await world.loop.release(world.older)
        await world.loop.advance()
        assert world.heard[-1] == ("bound", 2)

    in_world(scenario)


def test_a_growth_that_the_ranks_refuse_fails_who_was_to_grow_and_loses_nothing() -> None:
    """Their memory comes back with their release, the added blocks with it."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.refuses = True
        assert not await world.loop.advance()
        assert world.heard[-2:] == [("rank 0: no", 1), ("rank 0: no", 2)]
        assert world.scheduler.num_running == 0
        await world.loop.release(world.younger)
        await world.loop.release(world.older)
        world.pool.check_integrity()
        assert world.pool.num_free_blocks == 6

    in_world(scenario, num_blocks=6)


def test_memory_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    """After some looks the youngest gives way, as if nothing were on its way."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = 100
        await world.loop.advance()
        assert world.pool.num_quarantined_blocks == 2
        while await world.loop.advance():
            pass
        assert world.heard[-1] == ("preempted", 2), "the older one waits"
        for _ in range(4):
            await world.loop.retry_quarantine()
        world.heard.clear()
        await world.loop.advance()
        assert world.heard == [("quarantined", 0), ("preempted", 1)]

    in_world(scenario, num_blocks=5)
