"""A simulated data plane: transfers take time, and may come twice, late, in part, after their sender gave up, or not at all.

Where transfers are revocable the receiver's generation is checked when bytes land. Where they are not, it is checked when a
transfer begins, and memory that is taken back meanwhile stays in quarantine until the transfer is over. Where they need the peer,
as over tcp, nothing is written into or read from a rank that stands still before it goes on: what was sent to it lands then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from common.layout.planner import ReshardPlan
from contracts.handoff import Grant
from contracts.manifest import PlannedPart
from contracts.rank import PartPushed, PushOutcome
from contracts.requests import WorkerRef
from tests.simulation.memory_model import ModelMemory, Owner
from tests.simulation.processes import simulation_loop
from tests.simulation.standstill import Standstills
from tests.simulation.verdicts import Verdicts
from tests.simulation.weather import Links, Weather

LATENCY_S: Final = (0.0005, 0.004)
_HOLD_S: Final = 0.0002
SLOW: Final = 100.0
GIVES_UP_S: Final = 1.0
LATE_S: Final = (0.2, 4.0)


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
    """Whether it has left its sender: whatever becomes of that one, it goes on."""
    told: bool = False
    owner: Owner | None = None


class Plane:
    """Every engine's memory, and what is under way between them."""

    def __init__(
        self,
        rng: random.Random,
        verdicts: Verdicts,
        *,
        revocable: bool,
        needs_peer: bool = False,
        checks: bool = True,
    ) -> None:
        self.rng: Final = rng
        self.verdicts = verdicts
        self.revocable = revocable
        self.needs_peer = needs_peer
        self._checks = checks
        self._memories: dict[tuple[str, str, int], ModelMemory] = {}
        self.transfers: dict[Transfer, None] = {}
        self.links: Final = Links()
        self.still: Final = Standstills()
        self.num_reads: Final[Counter[str]] = Counter()
        """By source: shards that are being read from it."""
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
        weather = self.links.between(transfer.sender.worker_id, transfer.grant.worker_id)
        seconds = self.rng.uniform(*LATENCY_S)
        if not self.revocable and not self._lock(transfer):
            return
        match weather:
            case Weather.FAIR:
                self._arrives(transfer, seconds)
            case Weather.SLOW:
                self._arrives(transfer, SLOW * seconds)
            case Weather.RAGGED:
                self._ragged(transfer, seconds)
            case Weather.BLACK_HOLE:
                self._gives_up(transfer, GIVES_UP_S, arrives=self.rng.random() < 0.7)

    def touches(self, worker_id: str) -> bool:
        """Whether anything is being written by a worker, to it, or read from it."""
        ends = ((each.sender.worker_id, each.grant.worker_id) for each in self.transfers)
        return self.num_reads[worker_id] > 0 or any(worker_id in both for both in ends)

    def memory_of(self, grant: Grant) -> ModelMemory:
        """The memory that a grant is for."""
        return self._memories[grant.worker_id, grant.incarnation, grant.dp_rank]

    # What becomes of a transfer.

    def _ragged(self, transfer: Transfer, seconds: float) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self.verdicts.saw("transfer_twice")
            again = seconds + self.rng.uniform(0.0, 0.05)
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
        simulation_loop().call_outside(seconds, lambda: self._forsake(transfer))
        late = seconds + self.rng.uniform(*LATE_S)
        if not arrives:
            self._at(transfer, late, lambda: self._end(transfer))
            return
        if self.revocable:
            self._at(transfer, late - _HOLD_S, lambda: self._lock(transfer))
        self._at(transfer, late, lambda: self._land_late(transfer))

    def _land_late(self, transfer: Transfer) -> None:
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
        memory = self.memory_of(transfer.grant)
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
        memory = self.memory_of(transfer.grant)
        if transfer.phase is not Phase.LOCKED or memory.is_gone:
            return
        if transfer.told:
            self.verdicts.saw("transfer_late")
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
        """Once: who has been told that nobody knows is not told what became of it after all."""
        if transfer.told:
            return
        transfer.told = True
        now_ns = round(simulation_loop().time() * 1e9)
        for push in transfer.pushes:
            transfer.report(msgspec.structs.replace(push, outcome=outcome, reason=reason, done_ns=now_ns))

    def _end(self, transfer: Transfer) -> None:
        if transfer.phase is Phase.LOCKED and transfer.owner is not None:
            transfer.owner.locks -= 1
        transfer.phase = Phase.OVER
        self.transfers.pop(transfer, None)

    def _at(self, transfer: Transfer, delay_s: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if transfer.phase is Phase.OVER:
                return
            if not self.still.any_holds:
                action()
                return
            if not transfer.captured and self.still.holds(transfer.sender.worker_id, transfer.pushes[0].rank):
                self.still.park(transfer.sender.worker_id, act)
                return
            receiver = transfer.grant.worker_id
            if self.needs_peer and any(self.still.holds(receiver, push.destination_rank) for push in transfer.pushes):
                self._hang(transfer)
                self.still.park(receiver, act)
                return
            action()

        simulation_loop().call_outside(delay_s, act)

    def _hang(self, transfer: Transfer) -> None:
        """It waits for its receiver; its sender does not, for long."""
        if not transfer.captured:
            transfer.captured = True
            self.verdicts.saw("transfer_hung")
            simulation_loop().call_outside(GIVES_UP_S, lambda: self._forsake(transfer))

    def _forsake(self, transfer: Transfer) -> None:
        if transfer.phase is not Phase.OVER:
            self._tell(transfer, PushOutcome.INDETERMINATE, "no answer in time")
