"""Lets faults happen to a simulated mesh, and pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from tests.simulation.disturbance import Disturbances, disturbance
from tests.simulation.plots import Fault, FaultKind
from tests.simulation.processes import simulation_loop
from tests.simulation.schedule import NUM_FAULTS
from tests.simulation.sim_mesh import Seat, SimulatedMesh
from tests.simulation.weather import Weather

_WEATHER: Final = {
    FaultKind.SLOW_LINK: Weather.SLOW,
    FaultKind.BLACK_HOLE: Weather.BLACK_HOLE,
    FaultKind.RAGGED_LINK: Weather.RAGGED,
}
_BLINK_S: Final = 0.02
_BLINK_EVERY_S: Final = 0.3
_LOOK_EVERY_S: Final = 0.02
_AT_READING: Final = 0.7
_AIMED: Final = 0.3
_AIM_S: Final = 3.0
_AIM_EVERY_S: Final = 0.001


_REFUSED: Final = ("bind", "extend", "link", "digest")


class FaultPlayer:
    """Plays the faults of a schedule. `num_playing` are those that have not passed, `num_acted` those that found what they befall.

    A fault that finds nobody is void. Where too few would be left, noise comes in its place: that befalls everybody.
    """

    def __init__(self, mesh: SimulatedMesh) -> None:
        self._mesh = mesh
        self._disturbances = Disturbances(mesh.noise)
        self._num_to_come = 0
        self.num_playing = 0
        self.num_acted = 0

    def plan(self, faults: Iterable[Fault]) -> None:
        """Let each fault happen at its moment, counted from now."""
        for fault in faults:
            self.num_playing += 1
            self._num_to_come += 1
            begin = self._aim if fault.kind is FaultKind.STALL and fault.severity >= _AIMED else self._begin
            simulation_loop().call_outside(fault.at_s, partial(begin, fault))

    def _aim(self, fault: Fault, left_s: float = _AIM_S) -> None:
        """Begin when something is under way that the fault can hold up, or after a while all the same."""
        if left_s <= 0 or self._mesh.plane.touches(fault.whom):
            self._begin(fault)
        else:
            simulation_loop().call_outside(_AIM_EVERY_S, partial(self._aim, fault, left_s - _AIM_EVERY_S))

    def _begin(self, fault: Fault) -> None:
        verdicts, least = self._mesh.verdicts, NUM_FAULTS[0]
        name = f"{fault.kind}:pair" if fault.peer else str(fault.kind)
        whom = " and ".join(filter(None, (fault.whom, fault.peer)))
        self._num_to_come -= 1
        ends = self._do(fault)
        if ends is None:
            verdicts.saw(f"fault:{name}:void")
            verdicts.say("fault", f"{name} {whom} finds nobody")
            if self.num_acted + self._num_to_come < least:
                self._num_to_come += 1
                self._begin(msgspec.structs.replace(fault, kind=FaultKind.NOISE, whom="", peer=""))
            else:
                self.num_playing -= 1
            return
        self.num_acted += 1
        verdicts.saw(f"fault:{name}")
        verdicts.say("fault", f"{name} {whom} for {fault.for_s:.3f} s")

        def end() -> None:
            verdicts.say("fault", f"{name} {whom} is over")
            ends()
            self.num_playing -= 1

        simulation_loop().call_outside(fault.for_s, end)

    def _do(self, fault: Fault) -> Callable[[], None] | None:
        """Begin with a fault; returns what ends it. None if there was nobody to befall."""
        mesh, server = self._mesh, self._mesh.server
        match fault.kind:
            case FaultKind.NOISE | FaultKind.LATE | FaultKind.STORE | FaultKind.WRITES:
                one = disturbance(fault.kind, fault.severity)
                self._disturbances.begin(one)
                return partial(self._disturbances.end, one)
            case FaultKind.BLINK:
                return self._blink(fault)
            case FaultKind.CRASH:
                return _nothing if mesh.kill(fault.whom, restart_s=fault.for_s) else None
            case FaultKind.DRAIN:
                return _nothing if mesh.drain(fault.whom, limit_s=fault.for_s) else None
            case FaultKind.FREEZE:
                return self._freeze(fault)
            case FaultKind.OVERLAP:
                return self._overlap(fault)
            case FaultKind.RANK | FaultKind.STEP | FaultKind.REFUSAL | FaultKind.STALL:
                return self._befall_rank(fault)
            case FaultKind.PARTITION:
                bus = mesh.seats[fault.whom].bus
                if bus is None or bus.is_cut:
                    return None
                bus.cut(notices=fault.severity < 0.5)
                return bus.heal
            case FaultKind.OUTAGE | FaultKind.WIPE:
                if not server.is_up:
                    return None
                server.go_down()
                return partial(server.come_back, wiped=fault.kind is FaultKind.WIPE)
            case FaultKind.STANDSTILL:
                server.freeze()
                return server.thaw
            case FaultKind.SLOW_LINK | FaultKind.BLACK_HOLE | FaultKind.RAGGED_LINK:
                return mesh.plane.links.begin(_WEATHER[fault.kind], fault.whom, fault.peer)

    def _befall_rank(self, fault: Fault) -> Callable[[], None] | None:
        """Something is wrong with one rank of a worker."""
        engines = self._mesh.seats[fault.whom].engines
        if not engines:
            return None
        engine = engines[0]
        match fault.kind:
            case FaultKind.RANK:
                engine.lose()
            case FaultKind.STEP:
                engine.num_failing_steps += 1
            case FaultKind.REFUSAL:
                engine.refuses[_REFUSED[int(fault.severity * len(_REFUSED))]] += 1
            case _:
                rank = int(fault.severity * engine.num_ranks)
                return self._mesh.plane.still.begin(fault.whom, rank)
        return _nothing

    def _blink(self, fault: Fault) -> Callable[[], None]:
        """The bus is gone for an instant: what was under way is lost, and nobody knows whether it was done."""
        server, loop = self._mesh.server, simulation_loop()
        is_over = False

        def blink() -> None:
            if is_over:
                return
            if server.is_up:
                server.go_down()
                loop.call_outside(_BLINK_S, server.come_back)
            loop.call_outside(_BLINK_EVERY_S * (0.5 + fault.severity), blink)

        def end() -> None:
            nonlocal is_over
            is_over = True

        blink()
        return end

    def _overlap(self, fault: Fault) -> Callable[[], None] | None:
        """Whoever leads stands still. It goes on soon after another one has read what was left, or has begun to lead."""
        mesh, loop = self._mesh, simulation_loop()
        leaders = [name for name in mesh.schedule.brokers if mesh.leads(name)]
        if not leaders:
            return None
        wake = self._freeze(msgspec.structs.replace(fault, whom=leaders[0]))
        if wake is None:
            return None
        sign, wait_s = ("handoff_adopted", 0.3) if fault.severity < _AT_READING else ("leadership_began", 3.0)
        count = mesh.verdicts.seen[sign]
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                wake()

        def look() -> None:
            if is_over:
                return
            if mesh.verdicts.seen[sign] == count:
                loop.call_outside(_LOOK_EVERY_S, look)
            else:
                loop.call_outside(wait_s * fault.severity, end)

        look()
        return end

    def _freeze(self, fault: Fault) -> Callable[[], None] | None:
        """The process stands still; of a worker in half of the cases its ranks, too."""
        seat: Seat = self._mesh.seats[fault.whom]
        process = seat.process
        if process is None or not process.runs:
            return None
        process.is_frozen = True
        seat.frozen_until = self._mesh.clock.monotonic() + fault.for_s
        with_ranks = bool(seat.engines) and fault.severity < 0.5
        ranks_go_on = self._mesh.plane.still.begin(fault.whom) if with_ranks else _nothing

        def wake() -> None:
            if not process.is_dead:
                simulation_loop().go_on(process)
            ranks_go_on()

        return wake


def _nothing() -> None:
    """The fault is over by itself."""
