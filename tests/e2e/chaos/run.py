"""One run under fire: a calm mesh tells what must come, then faults fall on it under load, then it must be as it was."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from common.runtime.clock import Clock, Deadline, SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.chaos.cases import Case, greedy_cases, sampled_questions
from tests.e2e.chaos.faults import Fault, Faults, draw
from tests.e2e.chaos.outages import Allowance, NatsWatch, freezes
from tests.e2e.chaos.processes import Processes
from tests.e2e.chaos.report import Report, make_report
from tests.e2e.chaos.rest import unrest_after
from tests.e2e.chaos.streams import REQUEST_S, Ending, Load, Outcome
from tests.e2e.launcher_traces import Traces, short_folder
from tests.e2e.mesh_probe import Probe

_MODEL: Final = Path(__file__).resolve().parents[3] / "models" / "tiny"
_SETTLE_S: Final = 120.0
_SERVED_AGAIN_S: Final = 120.0
_POLL_S: Final = 0.2


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. With `script` those faults are done, one after the other; without, faults by chance for `duration_s`."""

    seed: int
    num_streams: int = 16
    duration_s: float = 60.0
    pause_s: tuple[float, float] = (1.0, 5.0)
    """Between two faults, at least and at most."""
    script: tuple[Fault, ...] = ()
    strict: bool = False
    transport: str = "shm"
    workers: tuple[tuple[str, str], ...] = (("prefill", "tp=2"), ("decode", "tp=1"), ("decode", "tp=1"))
    num_brokers: int = 2
    num_sampled: int = 6
    request_s: float = REQUEST_S
    """What the router gives each request."""

    @property
    def spec(self) -> MeshSpec:
        """The mesh: short deadlines, faults that take their time to be noticed shortened, and restarts without a bound."""
        return MeshSpec(
            mode=f"chaos over {self.transport}",
            model=_MODEL,
            workers=self.workers,
            overrides=(
                f"transport={self.transport}",
                f"launcher.brokers={self.num_brokers}",
                "launcher.restarts_per_minute=1000",
                f"router.request_timeout_s={self.request_s}",
                "collective_timeout_ms=6000",
                # Between the end of prefill's steps and the closed ledger lies time to be hit.
                "prefill.failpoints=delay:role=value,layer=3,source=0,ms=15",
            ),
            restart=True,
        )


class Chaos:
    """The run against one mesh that is ready."""

    def __init__(self, settings: ChaosSettings, mesh: Mesh, probe: Probe, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._mesh = mesh
        self._probe = probe
        self._say = say
        self._clock: Clock = SystemClock()
        self._rng = random.Random(settings.seed)
        self._processes = Processes(mesh.pid)
        self._faults = Faults(self._processes, probe.nats)
        self._watch = NatsWatch(mesh.nats_url)
        self._needed_s: dict[str, float] = {}
        self._more: list[str] = []

    async def run(self) -> Report:
        """Learn, attack, and look at what is left."""
        cases = greedy_cases() + await self._learn()
        if self._settings.strict:
            await self._take_times(cases)
        await self._settled("before the first fault")
        outcomes = await self._attack(cases)
        await self._settled("after the last fault")
        outages = (*self._watch.outages, *freezes(self._faults.happened))
        allowance = Allowance(request_s=self._settings.request_s, needed_s=self._needed_s, outages=outages)
        restarts = Counter(re.findall(r"\] (\S+) runs again", _console(self._mesh)))
        return make_report(
            outcomes,
            self._faults.happened,
            strict=self._settings.strict,
            restarts=restarts,
            more=self._more,
            allowance=allowance,
        )

    async def _learn(self) -> tuple[Case, ...]:
        """The sampled cases with what a calm mesh answers; one that is answered in two ways fails the run."""
        model = await self._probe.model()
        questions = sampled_questions(self._settings.num_sampled, self._rng)
        load = Load(self._mesh.url, model, questions, num_streams=1, seed=0)
        learnt = []
        async with aiohttp.ClientSession() as session:
            for question in questions:
                answers = [await load.ask(session, question) for _ in range(2)]
                if answers[0].token_ids != answers[1].token_ids or answers[0].ending is not Ending.WHOLE:
                    self._more.append(f"{question.name}: a calm mesh answers it in two ways: {answers}")
                learnt.append(msgspec.structs.replace(question, expected=tuple(answers[0].token_ids)))
        return tuple(learnt)

    async def _take_times(self, cases: tuple[Case, ...]) -> None:
        """How long each case takes under as many streams as there will be; a calm mesh answers all of them."""
        for outcome in await (await self._load(cases)).each_once():
            self._needed_s[outcome.case.name] = outcome.ended_at - outcome.started_at
            if outcome.ending is not Ending.WHOLE:
                self._more.append(f"{outcome.case.name}: a calm mesh did not answer it: {outcome}")

    async def _load(self, cases: tuple[Case, ...]) -> Load:
        settings = self._settings
        model = await self._probe.model()
        return Load(
            self._mesh.url,
            model,
            cases,
            num_streams=settings.num_streams,
            seed=settings.seed,
            request_s=settings.request_s,
        )

    async def _attack(self, cases: tuple[Case, ...]) -> list[Outcome]:
        load = await self._load(cases)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run(), name="load")
                watching = group.create_task(self._watch.run(), name="nats")
                if self._settings.script:
                    for fault in self._settings.script:
                        await self._do(fault)
                        await self._clock.sleep(self._rng.uniform(*self._settings.pause_s))
                else:
                    await self._by_chance()
                await self._served_again(load)
                load.stop()
                watching.cancel()
        finally:
            self._processes.thaw_all()
        return load.outcomes

    async def _by_chance(self) -> None:
        deadline = Deadline.after(self._clock, self._settings.duration_s)
        workers = tuple(
            name for role in ("prefill", "decode", "mixed") for name in self._settings.spec.worker_ids(role)
        )
        while not deadline.passed:
            await self._do(draw(self._rng, workers, self._settings.num_brokers))
            await self._clock.sleep(self._rng.uniform(*self._settings.pause_s))

    async def _do(self, fault: Fault) -> None:
        done = await self._faults.do(fault)
        where = f" while {fault.phase}" if fault.phase else ""
        self._say(f"{fault.action} {fault.target}{where}" + ("" if done else ": it does not run"))
        self._mesh.check_alive()

    async def _served_again(self, load: Load) -> None:
        """Wait until every stream is served: as many whole ones as there are streams, all begun after the last fault."""
        since, deadline = self._clock.monotonic(), Deadline.after(self._clock, _SERVED_AGAIN_S)
        while not deadline.passed:
            whole = [o for o in load.outcomes if o.ending is Ending.WHOLE and o.started_at >= since]
            if len(whole) >= self._settings.num_streams:
                return
            await self._clock.sleep(_POLL_S)
        self._more.append(f"the mesh does not serve {_SERVED_AGAIN_S:.0f} s after the last fault")

    async def _settled(self, when: str) -> None:
        if lacking := await unrest_after(self._probe, len(self._settings.workers), _SETTLE_S):
            self._more.append(f"{when}, the mesh does not come to rest: {lacking}")


@asynccontextmanager
async def chaos_mesh(spec: MeshSpec, folder: Path, traces: Traces, say: Callable[[str], None]) -> AsyncIterator[Mesh]:
    """A mesh whose processes and files are all below `traces`, stopped at the end whatever happens."""
    mesh = await Mesh.start(spec, folder, SystemClock(), say, environ=traces.environ)
    try:
        yield mesh
    finally:
        await mesh.stop()


async def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> Report:
    """Start a mesh, run, stop it, and count what it left behind among the broken promises."""
    with short_folder() as folder:
        logs = folder / "logs"
        logs.mkdir()
        traces = Traces.watch(folder / "tmp")
        async with chaos_mesh(settings.spec, logs, traces, say) as mesh:
            async with Probe(mesh) as probe:
                report = await Chaos(settings, mesh, probe, say).run()
            drained = await mesh.stop()
            console = _console(mesh)
        left = traces.left()
        more = [] if drained else [f"the mesh did not drain: {console[-2000:]}"]
        more += [f"left behind: {each}" for each in left]
        text = report.text + "".join(f"\n  {each}" for each in more)
        return Report(violations=(*report.violations, *more), text=text)


def _console(mesh: Mesh) -> str:
    return (mesh.logs / "launcher.log").read_text(encoding="utf-8", errors="replace")
