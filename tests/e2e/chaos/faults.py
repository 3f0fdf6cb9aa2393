"""Faults: what is done to which process, and at which moment of a handoff."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from common.runtime.clock import SystemClock
from contracts.events import EventName
from tests.e2e.chaos.processes import Processes

SHORT_S: Final = 1.5
LONG_S: Final = 9.0
"""Longer than a worker's and a router's lease, and than a broker keeps its own without renewing it."""
_MOMENT_S: Final = 3.0


class Action(StrEnum):
    """What is done."""

    KILL = "kill"
    FREEZE_SHORT = "freeze short"
    FREEZE_LONG = "freeze long"
    STOP = "stop"
    """In order, as an operator would."""


PHASES: Final = {
    "reserving": EventName.REQUEST_SUBMITTED,
    "computing": EventName.PREFILL_STARTED,
    "sending": EventName.LAYER_COMPUTED,
    "finished": EventName.PREFILL_FINISHED,
    "committing": EventName.LEDGER_CLOSED,
    "taking over": EventName.HANDOFF_COMMITTED,
    "decoding": EventName.TAKEN_OVER,
}
_WEIGHTS: Final = {Action.KILL: 5, Action.FREEZE_SHORT: 3, Action.FREEZE_LONG: 2}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `target` is a service's name, or `NAME/rank-N` for one of its ranks; `phase` is empty for any moment."""

    action: Action
    target: str
    phase: str = ""

    @property
    def is_router(self) -> bool:
        """Whether clients may lose their connection by it."""
        return self.target == "router"


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was done, from the first signal to the last, in monotonic seconds."""

    fault: Fault
    began_at: float
    ended_at: float


def draw(rng: random.Random, workers: tuple[str, ...], num_brokers: int) -> Fault:
    """A fault by chance: any process, any moment or a named one."""
    brokers = ("broker", *(f"broker-{number}" for number in range(1, num_brokers)))
    ranks = tuple(f"{worker}/rank-{number}" for worker in workers for number in range(4))
    target = rng.choice((rng.choice(workers), rng.choice(ranks), rng.choice(brokers), "nats", "router"))
    actions = tuple(_WEIGHTS)
    action = rng.choices(actions, weights=tuple(_WEIGHTS.values()))[0]
    if target == "nats" and action is Action.KILL:
        action = rng.choice((Action.KILL, Action.STOP))
    return Fault(action=action, target=target, phase=rng.choice(("", *PHASES)))


class Faults:
    """Does faults to one mesh, and keeps what was done. `nats` listens for the moments; it may lose its connection."""

    def __init__(self, processes: Processes, nats: Client) -> None:
        self._processes = processes
        self._nats = nats
        self._clock = SystemClock()
        self.happened: list[Happened] = []

    async def do(self, fault: Fault) -> bool:
        """Wait for the fault's moment, then do it and, for a frozen process, undo it; False if there is no such process now."""
        if fault.phase:
            await self._moment(fault.phase)
        name, _, rank = fault.target.partition("/rank-")
        pid = self._processes.rank(name, int(rank)) if rank else self._processes.service(name)
        if pid is None:
            return False
        began_at = self._clock.monotonic()
        match fault.action:
            case Action.KILL:
                self._processes.kill(pid)
            case Action.STOP:
                self._processes.terminate(pid)
            case Action.FREEZE_SHORT | Action.FREEZE_LONG:
                self._processes.freeze(pid)
                try:
                    await self._clock.sleep(SHORT_S if fault.action is Action.FREEZE_SHORT else LONG_S)
                finally:
                    self._processes.thaw(pid)
        self.happened.append(Happened(fault=fault, began_at=began_at, ended_at=self._clock.monotonic()))
        return True

    async def _moment(self, phase: str) -> None:
        """Return when a handoff reaches the phase; after a few seconds without one any moment will do."""
        try:
            subscription = await self._nats.subscribe(f"pd.v1.ev.*.*.{PHASES[phase]}")
            try:
                await subscription.next_msg(timeout=_MOMENT_S)
            finally:
                await subscription.unsubscribe()
        except (NatsError, TimeoutError):
            return
