"""An engine without a model whose memory is modelled: what it pushes takes time, and what it decodes must really be there."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineDeadError, EngineError, PullResult, StepResult
from contracts.handoff import Grant, PartDigest
from contracts.manifest import PlannedPart
from contracts.rank import (
    BindSequence,
    DrafterKind,
    ExtendSequences,
    PartPushed,
    PeerSide,
    PushOutcome,
    RankProgress,
    StepItem,
    StepPlan,
)
from contracts.rank_pull import PullReport, PullShards, PullStopped
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription
from tests.simulation.memory_model import Owner
from tests.simulation.plane import Phase, Plane, Transfer
from tests.simulation.processes import simulation_loop
from tests.simulation.schedule import BLOCK_SIZE, Pulls, WorkerPlan
from tests.simulation.sim_pull import READING, Reading, ReadingClock, SimulatedReads

_MAX_REPORTS: Final = 1 << 16
_CORRUPTS_ONE_OF: Final = 8
"""Of as many caches that are verified one is not what was computed."""


class SimulatedEngine(FakeEngine):
    """See `common.engine.port.Engine`."""

    def __init__(self, plane: Plane, plan: WorkerPlan, incarnation: str, dp_rank: int) -> None:
        super().__init__(
            ReadingClock(simulation_loop()),
            worker_id=plan.worker_id,
            incarnation=incarnation,
            dp_rank=dp_rank,
            dp=plan.dp,
            tp=plan.tp,
            dcp=plan.dcp,
            block_size=BLOCK_SIZE,
            num_blocks=plan.num_blocks,
            num_slots=plan.num_slots,
            num_staging_rows=0 if plan.pulls is Pulls.NOTHING else plan.num_slots,
            drafter=plan.guesses.drafter if plan.guesses.depth else DrafterKind.NONE,
            num_speculative_tokens=0 if plan.role == "prefill" else plan.guesses.depth,
            step_s=plan.step_s,
        )
        self.__dict__["reads"] = SimulatedReads()
        self._by_head = plan.role != "prefill" and plan.guesses.depth > 0 and plan.guesses.drafter is DrafterKind.MTP
        self._shares = plan.dcp > 1
        self._takes_over = plan.role == "decode"
        self._verifies = plan.verifies
        self._plane = plane
        self._ref = WorkerRef(worker_id=plan.worker_id, incarnation=incarnation)
        self.memory = plane.add(self._ref, dp_rank, BLOCK_SIZE)
        self._reports: asyncio.Queue[PartPushed] = asyncio.Queue(_MAX_REPORTS)
        self._begun: set[int] = set()
        self._heard: dict[int, list[PullReport]] = {}
        self._lost = asyncio.Event()
        self.num_failing_steps = 0
        self.refuses: Counter[str] = Counter()
        """How many of the next commands of each kind one rank refuses."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._info.ranks)

    def lose(self) -> None:
        """A rank dies, and with it the engine."""
        self._plane.lose(self._ref)
        self._lost.set()

    async def bind(self, binding: BindSequence) -> None:
        """See `Engine.bind`. Where one rank refuses, no other holds anything either."""
        await self._attend()
        self._refuse("bind")
        await super().bind(binding)
        problem = self.memory.take(binding)
        if problem:
            self._plane.verdicts.broken("I1", problem)
        if binding.push is not None:
            ref = WorkerRef(worker_id=binding.push.grant.worker_id, incarnation=binding.push.grant.incarnation)
            self._plane.plans[binding.handoff_id] = (self._links[ref].plan, binding.push.num_cached_tokens)
        verdicts = self._plane.verdicts
        if self._verifies and verdicts.corrupts and not zlib.crc32(binding.handoff_id.encode()) % _CORRUPTS_ONE_OF:
            verdicts.saw("corrupted")
            verdicts.corrupted.add(binding.handoff_id)
            self.corrupted.add(binding.handoff_id)

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """See `Engine.link`. Where one rank refuses, no other is linked either."""
        await self._attend()
        if self.refuses["link"]:
            await super().unlink(peer)
        self._refuse("link")
        await super().link(peer, ranks)

    async def link_source(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """See `Engine.link_source`."""
        await self._attend()
        if self.refuses["link"]:
            await super().unlink(peer)
        self._refuse("link")
        await super().link_source(peer, ranks)

    async def digest(self, seq: int, side: PeerSide, start: int, end: int) -> tuple[PartDigest, ...]:
        """See `Engine.digest`."""
        await self._attend()
        self._refuse("digest")
        return await super().digest(seq, side, start, end)

    async def pull(self, command: PullShards, observe: Callable[[PullReport], None]) -> PullResult:
        """See `Engine.pull`. What has been read lies here from then on: where it was to lie when the pull began, whose ever that is."""
        await self._attend()
        owner = self.memory.owner(command.seq)
        grant = None if owner is None else self._own_grant(owner)

        def arrived(report: PullReport) -> None:
            if owner is not None and grant is not None:
                self._arrived(owner, grant, report)
            observe(report)

        token = READING.set(Reading(self._plane, command, self._ref, self.memory))
        try:
            return await super().pull(command, arrived)
        finally:
            READING.reset(token)

    def _own_grant(self, owner: Owner) -> Grant:
        return Grant(
            worker_id=self._ref.worker_id,
            incarnation=self._ref.incarnation,
            generation=owner.generation,
            block_ids=tuple(owner.blocks),
            slot=owner.binding.slot,
        )

    def _arrived(self, owner: Owner, grant: Grant, report: PullReport) -> None:
        """Write what a report tells of, once: a pull that is asked for again tells everything again."""
        heard = self._heard.setdefault(owner.binding.seq, [])
        if isinstance(report, PullStopped) or any(each is report for each in heard):
            return
        heard.append(report)
        for part in report.parts:
            planned = PlannedPart(
                namespace=part.namespace,
                role=part.role,
                layer=part.layer,
                src_rank=part.source_rank,
                dst_rank=report.rank,
            )
            for start, end in part.ranges:
                problem = self.memory.write(grant, owner.binding.handoff_id, planned, start, end)
                if problem:
                    self._plane.verdicts.broken("I2", problem)

    async def extend(self, command: ExtendSequences) -> None:
        """See `Engine.extend`. Where one rank refuses, the others have given the blocks."""
        await self._attend()
        for extension in (
            command.extensions
        ):  # before a rank would refuse what has an owner: that would be no more than a failed request
            problem = self.memory.add(extension)
            if problem:
                self._plane.verdicts.broken("I1", problem)
        await super().extend(command)
        self._refuse("extend")

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """See `Engine.release`. Whoever still writes, here or at a sender, keeps memory from being given back."""
        await self._attend()
        busy = {seq for seq in seqs if self._is_busy(seq)}
        if busy and timeout_ms:
            await self._clock.sleep(timeout_ms / 1000)
            self._check_alive()
            busy = {seq for seq in seqs if self._is_busy(seq)}
        free = tuple(seq for seq in seqs if seq not in busy)
        indeterminate = await super().release(free, generation, timeout_ms)
        for seq in free:
            if seq not in indeterminate:
                self.memory.give_back(seq)
                self._begun.discard(seq)
                self._heard.pop(seq, None)
        if busy:
            self._plane.verdicts.saw("quarantined")
        return indeterminate | busy

    def _is_busy(self, seq: int) -> bool:
        """Take a sequence's memory back as far as that goes; say whether somebody is still at work in it."""
        for transfer in self._plane.of(self._ref, seq):
            self._plane.drop(transfer)
        sends = any(each.phase is Phase.LOCKED for each in self._plane.of(self._ref, seq))
        owner = self.memory.owner(seq)
        if owner is None:
            return sends
        owner.over = True
        return sends or owner.locks > 0

    async def step(self, plan: StepPlan) -> StepResult:
        """See `Engine.step`. What is decoded for the first time must lie here in full."""
        await self._attend()
        if self.num_failing_steps:
            self.num_failing_steps -= 1
            self._plane.verdicts.saw("step_failed")
            raise EngineError("rank 0: out of memory")
        for item in plan.items:
            binding = self._sequences.get(item.seq)
            if binding is not None and item.seq not in self._begun:
                self._begun.add(item.seq)
                if binding.push is None and (self._takes_over or item.start >= binding.num_prompt_tokens):
                    self._take_over(binding, item)
            if binding is not None and (not item.token_ids or item.bootstrap):
                self._check_guesses(binding, item)
        result = await super().step(plan)
        await self._attend()
        self._push()
        return result

    async def next_push(self) -> PartPushed:
        """See `Engine.next_push`."""
        return await self._reports.get()

    async def next_progress(self) -> RankProgress:
        """See `Engine.next_progress`."""
        await self._lost.wait()
        raise EngineDeadError("rank 0 has died")

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._plane.lose(self._ref)
        await super().stop()

    def _check_guesses(self, binding: BindSequence, item: StepItem) -> None:
        """A draft head guesses with the whole of its cache or not at all, and goes on from what was left to it once."""
        planned = self._plane.plans.get(binding.handoff_id)
        if self._by_head and planned is not None and item.num_tokens > 1 and not planned[0].has_drafts:
            text = f"{binding.handoff_id} is guessed for by a draft head that has no cache of its prompt"
            self._plane.verdicts.broken("I3", text)
        if item.num_tokens > 1:
            self._plane.verdicts.saw("guessed")

    def _take_over(self, binding: BindSequence, item: StepItem) -> None:
        plane, handoff_id = self._plane, binding.handoff_id
        plane.verdicts.saw("takeover")
        if handoff_id in plane.takeovers:
            plane.verdicts.broken(
                "I3", f"{handoff_id} was begun by {plane.takeovers[handoff_id]}, and by {self.memory.name}"
            )
        plane.takeovers[handoff_id] = self.memory.name
        if item.start != binding.num_prompt_tokens:
            text = f"{handoff_id} was begun at token {item.start}, behind a prompt of {binding.num_prompt_tokens}"
            plane.verdicts.broken("I3", text)
        if handoff_id in plane.verdicts.corrupted:
            plane.verdicts.broken("I3", f"{handoff_id} was begun with a cache that is not the one that was computed")
        owner, planned = self.memory.owner(binding.seq), plane.plans.get(handoff_id)
        if owner is None or planned is None:
            plane.verdicts.broken("I3", f"{handoff_id} was begun without memory or without a prompt")
            return
        if item.bootstrap != (planned[0].has_drafts and self._by_head):
            text = f"{handoff_id} was begun {'with' if item.bootstrap else 'without'} what its draft goes on from"
            plane.verdicts.broken("I3", text)
        if item.bootstrap:
            plane.verdicts.saw("takeover_with_draft")
        if self._shares:
            plane.verdicts.saw("takeover_by_ranks_that_share")
        missing = self.memory.missing(owner, *planned)
        if missing:
            plane.verdicts.broken("I3", f"{handoff_id} was begun without {missing}")
        owner.started = True

    def _push(self) -> None:
        """Send what the step has computed: one transfer for each rank and sequence, in the order of the ranks."""
        groups: dict[tuple[int, int], list[PartPushed]] = {}
        while not self._pushes.empty():
            push = self._pushes.get_nowait()
            if push.outcome is not PushOutcome.DONE:
                self._reports.put_nowait(push)
                continue
            groups.setdefault((push.rank, push.seq), []).append(push)
        for (_, seq), pushes in groups.items():
            target = self._sequences[seq].push if seq in self._sequences else None
            if target is None:
                continue
            self._plane.send(
                Transfer(
                    sender=self._ref,
                    seq=seq,
                    handoff_id=pushes[0].handoff_id,
                    grant=target.grant,
                    pushes=pushes,
                    report=self._reports.put_nowait,
                )
            )

    async def _attend(self) -> None:
        """Wait for all ranks: a command is over when each of them has answered."""
        self._check_alive()
        if self._plane.still.holds(self._ref.worker_id):
            self._plane.verdicts.saw("command_held")
            await self._plane.still.over(self._ref.worker_id)
            self._check_alive()

    def _refuse(self, command: str) -> None:
        """Raise `EngineError` if one rank is to refuse a command of this kind."""
        if self.refuses[command]:
            self.refuses[command] -= 1
            self._plane.verdicts.saw(f"refused_{command}")
            raise EngineError(f"rank 0: out of memory (on 1 of {self.num_ranks} ranks)")

    def _check_alive(self) -> None:
        if self._lost.is_set():
            raise EngineDeadError("rank 0 has died")
