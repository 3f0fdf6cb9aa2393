"""Faults that can be planted into the real services, to see that the simulation finds them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import msgspec
import pytest

from common.bus.lease import Lease
from common.bus.port import Subscription
from common.worker.core.blocks import BlockPool, Reservation
from common.worker.core.scheduler import Scheduler
from common.worker.core.sequence import Sequence
from common.worker.core.table import HandoffTable
from common.worker.service import WorkerService
from common.worker.unclaimed_prompts import UnclaimedPrompts
from contracts.codec import decode
from contracts.handoff import Released, ReleaseHandoff
from contracts.rank import StepPlan
from contracts.requests import CancelWork, TokenFrame
from services.broker.core.handoff import Handoff
from services.broker.core.ledger import Ledger
from services.broker.leadership import Leadership
from services.prefill.core import pair_step
from services.router.core.token_order import TokenOrder

_NUM_TOKENS_BEFORE_A_HOLD: Final = 3

Plant = Callable[[pytest.MonkeyPatch], None]


def commit_with_an_open_ledger(patch: pytest.MonkeyPatch) -> None:
    """The broker commits as soon as the prompt is computed."""
    patch.setattr(Handoff, "ledger_closed", property(lambda _handoff: True))


def return_memory_twice(patch: pytest.MonkeyPatch) -> None:
    """A pool forgets that it has taken a reservation back, and takes it back again with the next one."""
    inner = BlockPool.release
    last: dict[BlockPool, Reservation] = {}

    def release(pool: BlockPool, reservation: Reservation) -> None:
        before = last.get(pool)
        if before is not None:
            pool._held.setdefault(before.generation, before)
            inner(pool, before)
        last[pool] = reservation
        inner(pool, reservation)

    patch.setattr(BlockPool, "release", release)


def free_on_a_hint(patch: pytest.MonkeyPatch) -> None:
    """A worker gives granted memory back when it is told that nobody waits: the ranks hear nothing of it."""

    async def run_cancels(service: WorkerService, subscription: Subscription) -> None:
        async with subscription:
            async for message in subscription:
                sequence = service.table.get(decode(message.data, CancelWork).handoff_id)
                if sequence is not None and sequence.memory is not None:
                    service.replicas.of(sequence).pool.release(sequence.memory)

    patch.setattr(WorkerService, "run_cancels", run_cancels)


def obey_old_fences(patch: pytest.MonkeyPatch) -> None:
    """A broker does not notice that it has been deposed, and workers obey it."""

    async def keep(_leadership: Leadership, _lease: Lease) -> None:
        await asyncio.Event().wait()

    patch.setattr(Leadership, "_keep", keep)
    patch.setattr(HandoffTable, "admits_fence", lambda _table, _fence: True)


def count_instead_of_tiling(patch: pytest.MonkeyPatch) -> None:
    """The ledger is closed once something of every part has come."""

    def closed(ledger: Ledger) -> bool:
        num_told = sum(len(report.parts) for report in ledger.reports)
        return num_told >= len(ledger.planned)

    patch.setattr(Ledger, "closed", property(closed))


def ask_one_rank_of_a_group(patch: pytest.MonkeyPatch) -> None:
    """The ledger is closed once the first of the ranks that share blocks has its own."""

    def closed(ledger: Ledger) -> bool:
        first = (part for part in ledger.planned if part.residue == 0)
        names = ((ledger.source_of(part), (part.namespace, part.role, part.layer, part.dst_rank)) for part in first)
        return all(name in ledger.closed_parts for name in names)

    patch.setattr(Ledger, "closed", property(closed))


def believe_every_frame(patch: pytest.MonkeyPatch) -> None:
    """The router hands on what comes, also what came before."""
    inner = TokenOrder.accept

    def accept(order: TokenOrder, frame: TokenFrame) -> Items[int]:
        inner(order, frame)
        return frame.token_ids

    patch.setattr(TokenOrder, "accept", accept)


def forget_what_the_draft_goes_on_from(patch: pytest.MonkeyPatch) -> None:
    """A decode worker begins as if nothing of the draft head had come."""
    inner = Scheduler.start

    def start(scheduler: Scheduler, sequence: Sequence) -> None:
        sequence.bootstrap = False
        inner(scheduler, sequence)

    patch.setattr(Scheduler, "start", start)


def guess_without_a_cache(patch: pytest.MonkeyPatch) -> None:
    """A draft head guesses for every sequence, also where its cache has stayed behind."""
    inner = Scheduler.start

    def start(scheduler: Scheduler, sequence: Sequence) -> None:
        sequence.is_guessed = True
        inner(scheduler, sequence)

    patch.setattr(Scheduler, "start", start)


def hold_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A worker computes no more than some tokens of a sequence, and says so to nobody: it keeps it, and answers for it."""
    inner = Scheduler.plan

    def plan(scheduler: Scheduler) -> StepPlan | None:
        for each in scheduler.running:
            if len(each.output_ids) >= _NUM_TOKENS_BEFORE_A_HOLD:
                scheduler.hold(each)
        return inner(scheduler)

    patch.setattr(Scheduler, "plan", plan)


def forget_releases(patch: pytest.MonkeyPatch) -> None:
    """Workers thank for each second release, and go on holding what they were to give back."""
    inner = WorkerService._release_asked
    asked = itertools.count()

    async def release_asked(service: WorkerService, data: bytes) -> msgspec.Struct:
        if next(asked) % 2:
            return Released(handoff_id=decode(data, ReleaseHandoff).handoff_id)
        return await inner(service, data)

    patch.setattr(WorkerService, "_release_asked", release_asked)


def keep_prompts(patch: pytest.MonkeyPatch) -> None:
    """A worker asks nobody about prompts that lie and lie."""
    patch.setattr(UnclaimedPrompts, "look", lambda _prompts: None)


def never_meet_again(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker that could not link a pair does not try again."""
    patch.setattr(pair_step, "pause_s", lambda _num_failures: math.inf)


PLANTS: dict[str, tuple[Plant, str]] = {
    "commit with an open ledger": (commit_with_an_open_ledger, "I3"),
    "return memory twice": (return_memory_twice, "I1"),
    "free on a hint": (free_on_a_hint, "I1"),
    "obey old fences": (obey_old_fences, "fences"),
    "count instead of tiling": (count_instead_of_tiling, "I3"),
    "ask one rank of a group": (ask_one_rank_of_a_group, "I3"),
    "believe every frame": (believe_every_frame, "I4"),
    "forget what the draft goes on from": (forget_what_the_draft_goes_on_from, "I3"),
    "guess without a cache": (guess_without_a_cache, "I3"),
    "hold for ever": (hold_for_ever, "liveness"),
    "forget releases": (forget_releases, "liveness"),
    "keep prompts": (keep_prompts, "liveness"),
    "never meet again": (never_meet_again, "liveness"),
}
"""Each fault, and the invariant that it breaks."""
