"""Whether the mesh works once nothing is wrong any more: streams move, memory comes back, and there is a way for the next request.

A deadline ends every request, and takes back what it held, so that to end by it is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from common.bus.storage import WORKER_TTL_S
from common.worker.broker_client import ASK_S as WORKER_ASK_S
from common.worker.core.unclaimed import UNCLAIMED_S
from common.worker.service import SWEEP_EVERY_S
from services.prefill.core.pair import LONGEST_PAUSE_S
from services.prefill.meeting import MEETING_S
from services.router.core.patience import LONGEST_S
from services.router.replaying import ASK_S
from tests.simulation.faults import FaultPlayer
from tests.simulation.sim_mesh import RELEASE_TIMEOUT_S, RESERVE_WAIT_S, SimulatedMesh
from tests.simulation.sim_router import REROUTE_WAIT_S, Client

STILL_S: Final = 2 * WORKER_TTL_S + LONGEST_S + 3 * ASK_S + RESERVE_WAIT_S + REROUTE_WAIT_S
"""How long a stream may stand still in a mesh where nothing is wrong any more: all that it can have to wait for, one after the other.

Behind an outage nobody takes a worker for gone for twice its time to live; a router whose questions brought nothing asks again after
`LONGEST_S` at most, and waits for the answers of two workers and the broker; then another attempt may wait for a way, and for memory.
"""

WAY_S: Final = MEETING_S + LONGEST_PAUSE_S + 2 * WORKER_TTL_S
"""How long a mesh without a way may be without one: a pair that could not be linked is met again after `LONGEST_PAUSE_S` at most."""

HELD_S: Final = 3 * WORKER_TTL_S + RELEASE_TIMEOUT_S
"""How long anything may be held for requests that have ended, in a mesh where nothing is wrong any more.

A worker or router is taken for gone as above; a release is asked for until its time is over, and once more at the next sign of life.
"""

PROMPT_HELD_S: Final = HELD_S + UNCLAIMED_S + SWEEP_EVERY_S + WORKER_ASK_S
"""How long a prompt may be held that nobody will ask to run: as long as its handoff, and then until it is asked about once more."""

_LOOK_S: Final = 0.25


class Liveness:
    """Looks at all streams again and again, and notes those that stand still for too long.

    Nothing is wrong while no fault lasts, every process runs, the bus answers, and a broker leads. What faults have left behind (a
    message on its way, a transfer that comes late) is over long before `STILL_S`.
    """

    def __init__(self, mesh: SimulatedMesh, faults: FaultPlayer, clients: Sequence[Client]) -> None:
        self._mesh = mesh
        self._faults = faults
        self._clients = clients
        self._well_since = 0.0
        self._rests = (Rest(mesh, HELD_S, prompts=False), Rest(mesh, PROMPT_HELD_S, prompts=True))

    def look(self) -> None:
        """Judge every stream that is open."""
        now = self._mesh.clock.monotonic()
        waiting = [client for client in self._clients if client.due and not client.ended]
        if self._faults.num_playing or (waiting and not self._mesh.is_well):
            self._well_since = now
            return
        for client in waiting:
            still_s = now - max(self._well_since, client.moved_at)
            if still_s > STILL_S:
                text = f"request {client.ask.number} has stood still for {still_s:.1f} s, and nothing is wrong"
                self._mesh.verdicts.broken("liveness", text)
                client.end("stood still")

    def look_over(self) -> None:
        """Judge what is still held when every request has ended."""
        for rest in self._rests:
            rest.look()


class Rest:
    """Whether what is held goes in `bound_s` once every request has ended, with or without the `prompts` that nobody has asked to run."""

    def __init__(self, mesh: SimulatedMesh, bound_s: float, *, prompts: bool) -> None:
        self._mesh = mesh
        self._bound_s = bound_s
        self._prompts = prompts
        self._since = math.inf
        self._told = False

    def look(self) -> None:
        """Judge it, once."""
        now = self._mesh.clock.monotonic()
        unrest = self._mesh.unrest(prompts=self._prompts)
        if not unrest or self._since > now or not self._mesh.is_well:
            self._since = now
        held_s = now - self._since
        if held_s > self._bound_s and not self._told:
            self._told = True
            self._mesh.verdicts.broken("liveness", f"all requests have ended, and for {held_s:.1f} s: {unrest}")


async def check_way(mesh: SimulatedMesh) -> None:
    """When all is over everybody comes back by itself, and every router finds a way for a request."""
    until = mesh.clock.monotonic() + WAY_S
    while not (mesh.is_well and mesh.has_route):
        if mesh.clock.monotonic() > until:
            what = "no way for a request" if mesh.is_well else "somebody who does not work"
            mesh.verdicts.broken("liveness", f"all is over, and for {WAY_S:.0f} s there has been {what}")
            return
        await mesh.clock.sleep(_LOOK_S)
