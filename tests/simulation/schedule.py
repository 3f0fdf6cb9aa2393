"""What happens in one simulation: the mesh, what clients ask, and what goes wrong. All of it follows from a seed."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

import msgspec

from contracts.rank import DrafterKind
from tests.simulation.plots import LINK_FAULTS, WISHES, Fault, FaultKind, Plot, Wishes, faults_of

NUM_REQUESTS: Final = (8, 12)
NUM_FAULTS: Final = (3, 6)
BLOCK_SIZE: Final = 4
_SPAN_S: Final = 6.0
_PLOTTED: Final = 0.5
_SHARING_TP: Final = 4
_SHARED: Final = 0.6
_GUESSING: Final = 0.4
_PATIENT: Final = 0.3
_LEAST_S: Final = 8.0
_PATIENCE_S: Final = 120.0
"""Far longer than the last fault and `liveness.STILL_S` together: what hangs is found out before its deadline ends it."""
_LONG_ANSWERS: Final = (24, 48)
_NEEDS_ANOTHER: Final = frozenset({Plot.OVERLAP, Plot.AWAKENING})
"""Plots in which another broker has to take over at its time."""
_MORE: Final = (FaultKind.STALL, FaultKind.REFUSAL, FaultKind.DRAIN, FaultKind.WIPE, *LINK_FAULTS)
"""What some schedules have beside their other faults."""
_BY_CHANCE: Final = tuple(
    kind
    for kind in FaultKind
    if kind not in {FaultKind.OVERLAP, FaultKind.WRITES, FaultKind.STALL, FaultKind.REFUSAL, FaultKind.WIPE}
)
_HAS_MORE: Final = 0.4


class Pulls(StrEnum):
    """What a decode worker reads itself."""

    NOTHING = "nothing"
    STATES = "states"
    ALL = "all"


class Guesses(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a worker guesses, or keeps a draft for, and who guesses them."""

    depth: int = 0
    drafter: DrafterKind = DrafterKind.MTP


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What one client asks of a router at some moment, and when it leaves, if it does."""

    number: int
    router: str
    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    temperature: float
    timeout_s: float
    leaves_after_s: float | None


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    role: str
    worker_id: str
    tp: int
    dp: int
    dcp: int = 1
    num_blocks: int
    num_slots: int
    chunk_tokens: int
    step_s: float
    pulls: Pulls = Pulls.NOTHING
    is_parallel: bool = True
    verifies: bool = False
    reserved_output_tokens: int = 0
    guesses: Guesses = Guesses()


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A whole simulation. `revocable` and `needs_peer` are of its transfers: see `plane`."""

    seed: int
    plot: Plot
    revocable: bool
    needs_peer: bool
    workers: tuple[WorkerPlan, ...]
    routers: tuple[str, ...]
    brokers: tuple[str, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def processes(self) -> tuple[str, ...]:
        """Everybody by name."""
        return (*self.brokers, *self.routers, *(worker.worker_id for worker in self.workers))


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed, always the same."""
    rng = random.Random(seed)
    plot = rng.choice([each for each in Plot if each is not Plot.CHANCE]) if rng.random() < _PLOTTED else Plot.CHANCE
    workers = _guessing(_workers(rng, random.Random(f"{seed} grouping")), random.Random(f"{seed} guessing"))
    routers = ("router-0",) if rng.random() < 0.7 else ("router-0", "router-1")
    brokers = ("broker-0",) if rng.random() < 0.2 and plot not in _NEEDS_ANOTHER else ("broker-0", "broker-1")
    return Schedule(
        seed=seed,
        plot=plot,
        revocable=rng.random() < 0.6,
        needs_peer=random.Random(f"{seed} peers").random() < 0.5,
        workers=workers,
        routers=routers,
        brokers=brokers,
        asks=_patient(
            tuple(_ask(rng, number, routers, WISHES[plot]) for number in range(rng.randint(*NUM_REQUESTS))),
            random.Random(f"{seed} patience"),
        ),
        faults=_sorted(
            _faults(rng, plot, workers, routers, brokers)
            + _more_faults(random.Random(f"{seed} more"), workers, routers)
        ),
    )


def _workers(rng: random.Random, grouping: random.Random) -> tuple[WorkerPlan, ...]:
    counts = {"prefill": rng.randint(1, 2), "decode": rng.randint(1, 2), "mixed": int(rng.random() < 0.25)}
    found: list[WorkerPlan] = []
    for role, count in counts.items():
        tp = rng.choice((1, 2, 4))
        found += [
            WorkerPlan(
                role=role,
                worker_id=f"{role}-{number}",
                tp=tp,
                dp=2 if rng.random() < 0.2 else 1,
                dcp=2 if role == "decode" and tp == _SHARING_TP and grouping.random() < _SHARED else 1,
                num_blocks=rng.choice((24, 48, 96)),
                num_slots=rng.choice((2, 3, 8)),
                chunk_tokens=rng.choice((8, 16, 64)),
                step_s=rng.choice((0.004, 0.02, 0.06)),
                pulls=rng.choice(tuple(Pulls)) if role == "decode" else Pulls.NOTHING,
                is_parallel=rng.random() < 0.7,
                verifies=role == "decode" and rng.random() < 0.2,
                reserved_output_tokens=rng.choice((0, 1, 4)) if role != "prefill" else 0,
            )
            for number in range(count)
        ]
    return tuple(found)


def _guessing(workers: tuple[WorkerPlan, ...], rng: random.Random) -> tuple[WorkerPlan, ...]:
    """Let the workers of some schedules guess, most of them with a draft head, each as deep as it likes; some keep no draft."""
    if rng.random() >= _GUESSING:
        return workers
    drafter = DrafterKind.MTP if rng.random() < 0.8 else DrafterKind.NGRAM
    return tuple(
        msgspec.structs.replace(worker, guesses=Guesses(depth=rng.choice((1, 3, 8)), drafter=drafter))
        if rng.random() < 0.8
        else worker
        for worker in workers
    )


def _ask(rng: random.Random, number: int, routers: tuple[str, ...], wishes: Wishes) -> Ask:
    is_tight = rng.random() < wishes.tight
    most = 4 if rng.random() < wishes.short else 24
    return Ask(
        number=number,
        router=rng.choice(routers),
        at_s=rng.uniform(0.0, wishes.span_s),
        num_prompt_tokens=rng.randint(1, 40),
        max_tokens=1 if rng.random() < wishes.single else rng.randint(2, most),
        seed=rng.getrandbits(48),
        temperature=rng.choice((0.0, 1.0)),
        timeout_s=rng.uniform(*wishes.tight_s) if is_tight else rng.choice(wishes.deadlines_s),
        leaves_after_s=rng.uniform(0.0, 1.5) if rng.random() < wishes.leaves else None,
    )


def _patient(asks: tuple[Ask, ...], rng: random.Random) -> tuple[Ask, ...]:
    """Let the clients of some schedules wait far longer than anything may take, but for those in haste; some want long answers."""
    if rng.random() >= _PATIENT:
        return asks
    return tuple(
        msgspec.structs.replace(
            ask,
            timeout_s=_PATIENCE_S,
            max_tokens=rng.randint(*_LONG_ANSWERS) if ask.max_tokens > 1 and rng.random() < 0.5 else ask.max_tokens,
        )
        if ask.timeout_s >= _LEAST_S
        else ask
        for ask in asks
    )


def _faults(
    rng: random.Random,
    plot: Plot,
    workers: tuple[WorkerPlan, ...],
    routers: tuple[str, ...],
    brokers: tuple[str, ...],
) -> list[Fault]:
    names = tuple(worker.worker_id for worker in workers)
    everybody = (*brokers, *routers, *names)
    found = faults_of(plot, rng, workers=names, routers=routers, brokers=brokers)
    least, most = NUM_FAULTS
    for _ in range(rng.randint(max(0, least - len(found)), max(0, most - len(found)))):
        kind = rng.choice(_BY_CHANCE)
        match kind:
            case FaultKind.CRASH | FaultKind.FREEZE | FaultKind.PARTITION:
                # The broker that leads is one of many processes, and the one whose faults matter most.
                whom = brokers[0] if rng.random() < 0.2 else rng.choice(everybody)
            case FaultKind.DRAIN:
                whom = rng.choice((*brokers, *names))
            case FaultKind.RANK | FaultKind.STEP | FaultKind.SLOW_LINK | FaultKind.BLACK_HOLE | FaultKind.RAGGED_LINK:
                whom = rng.choice(workers).worker_id
            case _:
                whom = ""
        found.append(
            Fault(
                kind=kind,
                whom=whom,
                at_s=rng.uniform(0.0, _SPAN_S),
                for_s=_lasts(rng, kind, whom),
                severity=rng.random(),
            )
        )
    return found


def _more_faults(rng: random.Random, workers: tuple[WorkerPlan, ...], routers: tuple[str, ...]) -> list[Fault]:
    """What some schedules have on top of all else: ranks and links that fail alone, routers that drain, a store that is lost."""
    if rng.random() >= _HAS_MORE:
        return []
    found = []
    for _ in range(rng.randint(1, 2)):
        kind, whom, peer = rng.choice(_MORE), rng.choice(workers).worker_id, ""
        if kind is FaultKind.DRAIN:
            whom = rng.choice(routers)
        elif kind is FaultKind.WIPE:
            whom = ""
        elif kind in LINK_FAULTS:
            whom = rng.choice([worker.worker_id for worker in workers if worker.role == "prefill"])
            peer = rng.choice([worker.worker_id for worker in workers if worker.role == "decode"])
        found.append(
            Fault(
                kind=kind,
                whom=whom,
                peer=peer,
                at_s=rng.uniform(0.0, _SPAN_S),
                for_s=_lasts(rng, kind, whom),
                severity=rng.random(),
            )
        )
    return found


def _sorted(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _lasts(rng: random.Random, kind: FaultKind, whom: str) -> float:
    """A freeze may be longer than every lease, or as short as a pause of the scheduler."""
    if kind is FaultKind.FREEZE and whom.startswith("broker") and rng.random() < 0.5:
        return rng.uniform(7.0, 14.0)  # somebody else leads when it wakes up
    longest = {
        FaultKind.FREEZE: 13.0,
        FaultKind.PARTITION: 9.0,
        FaultKind.STALL: 8.0,
        FaultKind.OUTAGE: 6.0,
        FaultKind.STANDSTILL: 4.0,
    }
    top = longest.get(kind, 3.0)
    return rng.uniform(0.02, 0.5) if rng.random() < 0.3 else rng.uniform(0.5, top)
