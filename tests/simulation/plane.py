"""A simulated data plane: transfers take time, and may come twice, late, in part, after their sender gave up, or not at all.

Where transfers are revocable the receiver's generation is checked when bytes land. Where they are not, it is checked when a
transfer begins, and memory that is taken back meanwhile stays in quarantine until the transfer is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final

import msgspec

from common.layout.planner import ReshardPlan
from contracts.handoff import Grant
from contracts.manifest import PlannedPart
from contracts.rank import PartPushed, PushOutcome
from contracts.requests import WorkerRef
from tests.simulation.memory_model import ModelMemory, Owner
from tests.simulation.processes import simulation_loop
from tests.simulation.verdicts import Verdicts

_LATENCY_S: Final = (0.0005, 0.004)
_HOLD_S: Final = 0.0002
_SLOW: Final = 100.0
_GIVES_UP_S: Final = 1.0
_LATE_S: Final = (0.2, 4.0)


class Weather(StrEnum):
    """What transfers of a worker are like now."""

    FAIR = "fair"
    SLOW = "slow"
    RAGGED = "ragged"
    BLACK_HOLE = "black_hole"


class Phase(Enum):
    """Where a transfer is. One that is LOCKED has been let in, and will write whatever happens to its grant."""

    WIRE = 0
    LOCKED = 1
    OVER = 2


@dataclass(eq=False, slots=True)
class Transfer:
    """What one rank of a sender writes after one step."""

    sender: WorkerRef
    seq: int
    handoff_id: str
    grant: Grant
    pushes: list[PartPushed]
    report: Callable[[PartPushed], None]
    phase: Phase = Phase.WIRE
    captured: bool = False
    owner: Owner | None = None
    parked: list[Callable[[], None]] = field(default_factory=list)


class Plane:
    """Every engine's memory, and what is under way between them."""

    def __init__(self, rng: random.Random, verdicts: Verdicts, *, revocable: bool, checks: bool = True) -> None:
        self._rng = rng
        self.verdicts = verdicts
        self.revocable = revocable
        self._checks = checks
        self._memories: dict[tuple[str, str, int], ModelMemory] = {}
        self.transfers: dict[Transfer, None] = {}
        self.weather: dict[str, Weather] = {}
        self.frozen: set[str] = set()
        self.plans: dict[str, tuple[ReshardPlan, int]] = {}
        """By handoff: the plan of its transfer, and how many tokens need not be sent."""
        self.takeovers: dict[str, str] = {}
        """By handoff: who has begun to decode it."""

    def add(self, ref: WorkerRef, dp_rank: int, block_size: int) -> ModelMemory:
        """The memory of one replica's engine."""
        memory = ModelMemory(f"{ref.incarnation}/{dp_rank}", block_size)
        self._memories[ref.worker_id, ref.incarnation, dp_rank] = memory
        return memory

    def lose(self, ref: WorkerRef) -> None:
        """A worker's ranks are gone: their memory, and what they were sending."""
        for (worker_id, incarnation, _), memory in self._memories.items():
            if (worker_id, incarnation) == (ref.worker_id, ref.incarnation):
                memory.is_gone = True
        for transfer in tuple(self.transfers):
            if transfer.sender == ref and not (transfer.captured and transfer.phase is Phase.WIRE):
                self._end(transfer)

    def freeze(self, worker_id: str) -> None:
        """A worker's ranks stand still: what they are writing they go on holding."""
        self.frozen.add(worker_id)

    def wake(self, worker_id: str) -> None:
        """They go on."""
        self.frozen.discard(worker_id)
        for transfer in tuple(self.transfers):
            if transfer.sender.worker_id == worker_id:
                parked, transfer.parked = transfer.parked, []
                for action in parked:
                    action()

    def of(self, sender: WorkerRef, seq: int) -> list[Transfer]:
        """What is under way for one sequence of a sender."""
        return [each for each in self.transfers if each.seq == seq and each.sender == sender]

    def drop(self, transfer: Transfer) -> None:
        """A sender forgets what it has not begun. What has left it goes on."""
        if transfer.phase is Phase.WIRE and not transfer.captured:
            self._end(transfer)

    def send(self, transfer: Transfer) -> None:
        """Begin a transfer. Its sender hears of every push in it, once, unless it forgets it or dies."""
        self.transfers[transfer] = None
        weather = self.weather.get(transfer.sender.worker_id) or self.weather.get(
            transfer.grant.worker_id, Weather.FAIR
        )
        seconds = self._rng.uniform(*_LATENCY_S)
        if not self.revocable and not self._lock(transfer):
            return
        match weather:
            case Weather.FAIR:
                self._arrives(transfer, seconds)
            case Weather.SLOW:
                self._arrives(transfer, _SLOW * seconds)
            case Weather.RAGGED:
                self._ragged(transfer, seconds)
            case Weather.BLACK_HOLE:
                self._gives_up(transfer, _GIVES_UP_S, arrives=self._rng.random() < 0.7)

    # Pulls.

    def read_seconds(self, source: Grant) -> float:
        """How long the next shard takes that is read under a grant."""
        seconds = self._rng.uniform(*_LATENCY_S)
        match self.weather.get(source.worker_id, Weather.FAIR):
            case Weather.SLOW:
                return _SLOW * seconds
            case Weather.BLACK_HOLE:
                return _GIVES_UP_S
            case _:
                return seconds

    def why_unread(self, source: Grant) -> str:
        """Why what was read under a grant does not count; "" when it does. Its cells are looked at after the bytes."""
        memory = self._memories[source.worker_id, source.incarnation, source.dp_rank]
        weather = self.weather.get(source.worker_id, Weather.FAIR)
        is_broken = weather is Weather.BLACK_HOLE or (weather is Weather.RAGGED and self._rng.random() < 0.3)
        if memory.is_gone or is_broken or memory.granted(source) is None:
            self.verdicts.saw("shard_failed")
            return "the connection broke" if is_broken else "the source has taken its memory back"
        self.verdicts.saw("shard_pulled")
        return ""

    # What becomes of a transfer.

    def _ragged(self, transfer: Transfer, seconds: float) -> None:
        chance = self._rng.random()
        if chance < 0.3:
            self.verdicts.saw("transfer_twice")
            again = seconds + self._rng.uniform(0.0, 0.05)
            self._at(transfer, seconds, lambda: self._land(transfer, ends=False))
            self._arrives(transfer, again)
        elif chance < 0.45:
            self.verdicts.saw("transfer_half")
            self._at(transfer, seconds, lambda: self._break(transfer))
        elif chance < 0.6:
            self._gives_up(transfer, seconds, arrives=True)
        else:
            self._arrives(transfer, seconds)

    def _arrives(self, transfer: Transfer, seconds: float) -> None:
        if self.revocable:
            self._at(transfer, seconds - _HOLD_S, lambda: self._lock(transfer))
        self._at(transfer, seconds, lambda: self._land(transfer, ends=True))

    def _gives_up(self, transfer: Transfer, seconds: float, *, arrives: bool) -> None:
        """The sender cannot tell any more what became of it; then it arrives after all, or never does."""
        self.verdicts.saw("transfer_indeterminate")
        transfer.captured = True
        self._at(transfer, seconds, lambda: self._tell(transfer, PushOutcome.INDETERMINATE, "no answer in time"))
        late = seconds + self._rng.uniform(*_LATE_S)
        if not arrives:
            self._at(transfer, late, lambda: self._end(transfer))
            return
        if self.revocable:
            self._at(transfer, late - _HOLD_S, lambda: self._lock(transfer))
        self._at(transfer, late, lambda: self._land_late(transfer))

    def _land_late(self, transfer: Transfer) -> None:
        self.verdicts.saw("transfer_late")
        self._write(transfer, len(transfer.pushes))
        self._end(transfer)

    def _land(self, transfer: Transfer, *, ends: bool) -> None:
        if self.revocable and transfer.phase is Phase.WIRE and not self._lock(transfer):
            return
        self._write(transfer, len(transfer.pushes))
        if ends:
            self._tell(transfer, PushOutcome.DONE)
            self._end(transfer)

    def _break(self, transfer: Transfer) -> None:
        if self.revocable and not self._lock(transfer):
            return
        self._write(transfer, len(transfer.pushes) // 2)
        self._tell(transfer, PushOutcome.FAILED_QUIESCED, "the connection broke")
        self._end(transfer)

    def _lock(self, transfer: Transfer) -> bool:
        """Let a transfer write from now on, if its grant is good; say whether it may."""
        if transfer.phase is not Phase.WIRE:
            return transfer.phase is Phase.LOCKED
        memory = self._memory(transfer)
        owner = memory.granted(transfer.grant)
        if memory.is_gone or (owner is None and self._checks):
            self.verdicts.saw("transfer_refused")
            if memory.is_gone:
                self._tell(transfer, PushOutcome.FAILED_QUIESCED, "the peer is gone")
            else:
                self._tell(transfer, PushOutcome.STALE, "stale generation")
            self._end(transfer)
            return False
        transfer.phase, transfer.owner = Phase.LOCKED, owner
        if owner is not None:
            owner.locks += 1
        return True

    def _write(self, transfer: Transfer, num_pushes: int) -> None:
        memory = self._memory(transfer)
        if transfer.phase is not Phase.LOCKED or memory.is_gone:
            return
        for push in transfer.pushes[:num_pushes]:
            part = PlannedPart(
                namespace=push.namespace,
                role=push.role,
                layer=push.layer,
                src_rank=push.rank,
                dst_rank=push.destination_rank,
            )
            problem = memory.write(transfer.grant, transfer.handoff_id, part, push.start, push.end)
            if problem:
                self.verdicts.broken("I2", problem)
                return

    def _tell(self, transfer: Transfer, outcome: PushOutcome, reason: str = "") -> None:
        now_ns = round(simulation_loop().time() * 1e9)
        for push in transfer.pushes:
            transfer.report(msgspec.structs.replace(push, outcome=outcome, reason=reason, done_ns=now_ns))

    def _end(self, transfer: Transfer) -> None:
        if transfer.phase is Phase.LOCKED and transfer.owner is not None:
            transfer.owner.locks -= 1
        transfer.phase = Phase.OVER
        self.transfers.pop(transfer, None)

    def _memory(self, transfer: Transfer) -> ModelMemory:
        grant = transfer.grant
        return self._memories[grant.worker_id, grant.incarnation, grant.dp_rank]

    def _at(self, transfer: Transfer, delay_s: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if transfer.phase is Phase.OVER:
                return
            if transfer.sender.worker_id in self.frozen and not transfer.captured:
                transfer.parked.append(act)
                return
            action()

        simulation_loop().call_outside(delay_s, act)
