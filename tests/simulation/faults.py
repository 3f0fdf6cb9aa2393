"""Lets faults happen to a simulated mesh, and pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from tests.simulation.disturbance import Disturbances, disturbance
from tests.simulation.plane import Weather
from tests.simulation.plots import Fault, FaultKind
from tests.simulation.processes import simulation_loop
from tests.simulation.sim_mesh import Seat, SimulatedMesh

_WEATHER: Final = {
    FaultKind.SLOW_LINK: Weather.SLOW,
    FaultKind.BLACK_HOLE: Weather.BLACK_HOLE,
    FaultKind.RAGGED_LINK: Weather.RAGGED,
}
_BLINK_S: Final = 0.02
_BLINK_EVERY_S: Final = 0.3
_LOOK_EVERY_S: Final = 0.02
_AT_READING: Final = 0.7


class FaultPlayer:
    """Plays the faults of a schedule. `num_playing` are those that have not passed."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        self._mesh = mesh
        self._disturbances = Disturbances(mesh.noise)
        self.num_playing = 0

    def plan(self, faults: Iterable[Fault]) -> None:
        """Let each fault happen at its moment, counted from now."""
        for fault in faults:
            self.num_playing += 1
            simulation_loop().call_outside(fault.at_s, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        self._mesh.verdicts.saw(f"fault:{fault.kind}")
        self._mesh.verdicts.say("fault", f"{fault.kind} {fault.whom} for {fault.for_s:.3f} s")
        ends = self._do(fault)

        def end() -> None:
            self._mesh.verdicts.say("fault", f"{fault.kind} {fault.whom} is over")
            ends()
            self.num_playing -= 1

        simulation_loop().call_outside(fault.for_s, end)

    def _do(self, fault: Fault) -> Callable[[], None]:
        """Begin with a fault; returns what ends it."""
        mesh, server = self._mesh, self._mesh.server
        match fault.kind:
            case FaultKind.NOISE | FaultKind.LATE | FaultKind.STORE | FaultKind.WRITES:
                one = disturbance(fault.kind, fault.severity)
                self._disturbances.begin(one)
                return partial(self._disturbances.end, one)
            case FaultKind.BLINK:
                return self._blink(fault)
            case FaultKind.CRASH:
                mesh.kill(fault.whom, restart_s=fault.for_s)
                return _nothing
            case FaultKind.DRAIN:
                mesh.drain(fault.whom, limit_s=fault.for_s)
                return _nothing
            case FaultKind.FREEZE:
                return self._freeze(fault)
            case FaultKind.OVERLAP:
                return self._overlap(fault)
            case FaultKind.RANK:
                for engine in mesh.seats[fault.whom].engines[:1]:
                    engine.lose()
                return _nothing
            case FaultKind.STEP:
                for engine in mesh.seats[fault.whom].engines[:1]:
                    engine.num_failing_steps += 1
                return _nothing
            case FaultKind.PARTITION:
                bus = mesh.seats[fault.whom].bus
                if bus is None or bus.is_cut:
                    return _nothing
                bus.cut(notices=fault.severity < 0.5)
                return bus.heal
            case FaultKind.OUTAGE:
                if not server.is_up:
                    return _nothing
                server.go_down()
                return server.come_back
            case FaultKind.STANDSTILL:
                server.freeze()
                return server.thaw
            case FaultKind.SLOW_LINK | FaultKind.BLACK_HOLE | FaultKind.RAGGED_LINK:
                mesh.plane.weather[fault.whom] = _WEATHER[fault.kind]
                return lambda: mesh.plane.weather.update({fault.whom: Weather.FAIR})

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

    def _overlap(self, fault: Fault) -> Callable[[], None]:
        """Whoever leads stands still. It goes on soon after another one has read what was left, or has begun to lead."""
        mesh, loop = self._mesh, simulation_loop()
        leaders = [name for name in mesh.schedule.brokers if mesh.leads(name)]
        if not leaders:
            return _nothing
        wake = self._freeze(msgspec.structs.replace(fault, whom=leaders[0]))
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

    def _freeze(self, fault: Fault) -> Callable[[], None]:
        """The process stands still; of a worker in half of the cases its ranks, too."""
        seat: Seat = self._mesh.seats[fault.whom]
        process = seat.process
        if process is None or not process.runs:
            return _nothing
        process.is_frozen = True
        seat.frozen_until = self._mesh.clock.monotonic() + fault.for_s
        with_ranks = bool(seat.engines) and fault.severity < 0.5
        if with_ranks:
            self._mesh.plane.freeze(fault.whom)

        def wake() -> None:
            if not process.is_dead:
                simulation_loop().go_on(process)
            if with_ranks:
                self._mesh.plane.wake(fault.whom)

        return wake


def _nothing() -> None:
    """The fault is over by itself."""
