"""`control`: what one broker can take. Handoffs whose workers answer at once, so many in flight, beside the bus alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from common.bus.errors import BusError
from common.bus.nats import NatsBus
from common.bus.port import Bucket, Bus
from common.bus.server import NatsServer
from common.bus.storage import handoffs_config
from common.runtime.clock import Clock, Deadline
from common.runtime.settings import environment
from contracts import ids, subjects
from contracts.codec import decode, encode
from contracts.errors import PdmeshError
from contracts.handoff import CommitHandoff, ReleaseHandoff, ReserveDecode, RunPrefill
from contracts.requests import (
    Accepted,
    DisaggregatedRoute,
    Ping,
    Pong,
    Refused,
    SamplingParams,
    SubmitRequest,
    TokenFrame,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from loadtest.control_level import Held, Level, report_control
from loadtest.control_workers import DECODE, FIRST_TOKEN, PREFILL, grant_for
from loadtest.handoff import Say
from loadtest.processes import usage
from loadtest.report import Report
from loadtest.settings import ControlSettings
from loadtest.statistics import spread
from services.launcher.child import Child, ChildSpec

_ROUTER: Final = "router-0"
_SAMPLING: Final = SamplingParams(max_tokens=2, seed=1)
_NUM_PROMPT_TOKENS: Final = 40
_START_S: Final = 30.0
_DRAIN_S: Final = 5.0
_POLL_S: Final = 0.05
_NUM_LOOKS: Final = 4
"""How often the broker's memory is looked at while handoffs are in flight."""
_SETTLE_SHARE: Final = 1.5
"""How much longer than the broker remembers what has ended it is waited until it has forgotten all of it."""


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that are watched."""

    broker: int
    server: int


class Submitter:
    """The router's part: submits, and waits for the final frame."""

    def __init__(self, bus: Bus, clock: Clock, timeout_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[TokenFrame]] = {}
        self._numbers = itertools.count()
        self._start = ids.request_id(os.urandom(ids.ENTROPY_BYTES))

    async def listen(self) -> None:
        """Take the frames, for ever."""
        async with await self._bus.subscribe(subjects.tokens_filter(_ROUTER)) as subscription:
            async for message in subscription:
                frame = decode(message.data, TokenFrame)
                waiting = self._waiting.get(frame.handoff_id)
                if waiting is not None and not waiting.done() and frame.final:
                    waiting.set_result(frame)

    def request(self) -> SubmitRequest:
        """The next request."""
        request_id = f"{self._start}{next(self._numbers)}"
        return SubmitRequest(
            handoff_id=ids.handoff_id(request_id, 0),
            request_id=request_id,
            attempt=0,
            router_id=_ROUTER,
            route=DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
            num_prompt_tokens=_NUM_PROMPT_TOKENS,
            prompt_hash="h",
            sampling=_SAMPLING,
            timeout_ms=round(self._timeout_s * 1e3),
        )

    async def hand_off(self) -> float:
        """One handoff through the broker; returns its ms, from the submit to the final frame. Raises `PdmeshError`."""
        submit = self.request()
        waiting = self._waiting[submit.handoff_id] = asyncio.get_running_loop().create_future()
        began = self._clock.monotonic()
        try:
            await _ask(self._bus, subjects.broker_rpc(BrokerVerb.SUBMIT), submit, self._timeout_s)
            async with asyncio.timeout(self._timeout_s):
                frame = await waiting
        finally:
            del self._waiting[submit.handoff_id]
        if frame.error is not None:
            raise PdmeshError.from_info(frame.error)
        return (self._clock.monotonic() - began) * 1e3

    async def pass_by(self, bucket: Bucket) -> float:
        """The same messages without a broker: three requests to workers, the record written twice; returns the ms."""
        submit = self.request()
        began = self._clock.monotonic()
        revision = await bucket.create(f"bare-{submit.handoff_id}", encode(submit))
        common: dict[str, Any] = {
            "handoff_id": submit.handoff_id,
            "request_id": submit.request_id,
            "attempt": 0,
            "router_id": "nobody",
            "fence": 1,
            "num_prompt_tokens": submit.num_prompt_tokens,
            "sampling": submit.sampling,
            "timeout_ms": submit.timeout_ms,
        }
        reserve = ReserveDecode(**common, incarnation=DECODE.incarnation, source=PREFILL)
        run = RunPrefill(
            **common, incarnation=PREFILL.incarnation, prompt_hash="h", grant=grant_for(reserve), num_cached_tokens=0
        )
        commit = CommitHandoff(
            handoff_id=submit.handoff_id,
            incarnation=DECODE.incarnation,
            fence=1,
            first_token=FIRST_TOKEN,
            num_cached_tokens=0,
            timeout_ms=submit.timeout_ms,
        )
        await self._ask_worker(WorkerRole.DECODE, DECODE.worker_id, WorkerVerb.RESERVE, reserve)
        await self._ask_worker(WorkerRole.PREFILL, PREFILL.worker_id, WorkerVerb.RUN, run)
        await bucket.update(f"bare-{submit.handoff_id}", encode(submit), revision)
        await self._ask_worker(WorkerRole.DECODE, DECODE.worker_id, WorkerVerb.COMMIT, commit)
        return (self._clock.monotonic() - began) * 1e3

    async def _ask_worker(self, role: WorkerRole, worker: str, verb: WorkerVerb, message: msgspec.Struct) -> None:
        await self._bus.request(subjects.worker_rpc(role, worker, verb), encode(message), timeout=self._timeout_s)


async def run_control(settings: ControlSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure one broker at every number of handoffs in flight, and fill the report."""
    levels: list[Level] = []
    with tempfile.TemporaryDirectory(prefix="pdmesh-control-") as folder:
        async with _control_plane(settings, Path(folder), clock) as (bus, group, pids):
            submitter = Submitter(bus, clock, settings.request_timeout_s)
            listening = group.create_task(submitter.listen(), name="frames")
            bucket = await bus.ensure_bucket(handoffs_config(60.0))
            for num_in_flight in settings.in_flight:
                levels.append(await _measure(settings, num_in_flight, submitter, bucket, pids, clock))
                say(f"{num_in_flight} in flight: {levels[-1].rate:.0f} handoffs/s")
            listening.cancel()
    report_control(report, levels)


async def _measure(  # noqa: PLR0917 - who measures what, with how many
    settings: ControlSettings, num_in_flight: int, submitter: Submitter, bucket: Bucket, pids: Pids, clock: Clock
) -> Level:
    pid = pids.broker

    async def bare() -> float:
        return await submitter.pass_by(bucket)

    await _load(submitter.hand_off, max(num_in_flight, settings.num_handoffs // 4), num_in_flight)  # warm
    await clock.sleep(_SETTLE_SHARE * settings.keep_ended_s)
    before = await asyncio.to_thread(usage, pid)
    cpu_before, server_before, began = _cpu_s(pid), _cpu_s(pids.server), clock.monotonic()
    held = Held(keep_ended_s=settings.keep_ended_s, own_bytes=before.own_bytes)
    look_every = max(1, settings.num_handoffs // _NUM_LOOKS)

    async def watched() -> float:
        held.began()
        took = await submitter.hand_off()
        held.ended(clock.monotonic())
        if held.num_ended % look_every == 0:
            num_held = held.count(clock.monotonic())
            held.note((await asyncio.to_thread(usage, pid)).own_bytes, num_held)
        return took

    times = await _load(watched, settings.num_handoffs, num_in_flight)
    took_s, cpu_s, server_s = clock.monotonic() - began, _cpu_s(pid) - cpu_before, _cpu_s(pids.server) - server_before
    await clock.sleep(_SETTLE_SHARE * settings.keep_ended_s)
    after = await asyncio.to_thread(usage, pid)
    alone = await _load(bare, max(num_in_flight, settings.num_handoffs // 4), num_in_flight)
    whole_spread, bare_spread = spread(times), spread(alone)
    if whole_spread is None or bare_spread is None:
        raise PdmeshError("no handoff was measured")
    return Level(
        num_in_flight=num_in_flight,
        num_handoffs=settings.num_handoffs,
        rate=settings.num_handoffs / took_s,
        whole=whole_spread,
        bus_alone=bare_spread,
        broker_cpu_ms=cpu_s * 1e3 / settings.num_handoffs,
        server_cpu_ms=server_s * 1e3 / settings.num_handoffs,
        bytes_before=before.own_bytes,
        bytes_at_peak=held.peak_bytes,
        num_held=held.num_at_peak,
        bytes_after=after.own_bytes,
    )


async def _load(work: Callable[[], Awaitable[float]], count: int, num_in_flight: int) -> list[float]:
    """`count` times `work`, never more than `num_in_flight` at once."""
    left = itertools.count(1)
    times: list[float] = []

    async def worker() -> None:
        while next(left) <= count:
            times.append(await work())

    async with asyncio.TaskGroup() as group:
        for number_ in range(num_in_flight):
            group.create_task(worker(), name=f"load-{number_}")
    return times


@asynccontextmanager
async def _control_plane(
    settings: ControlSettings, folder: Path, clock: Clock
) -> AsyncIterator[tuple[Bus, asyncio.TaskGroup, Pids]]:
    """A server, a broker process and a process of instant workers; all end with the context."""
    server = NatsServer(folder / "nats")
    await asyncio.to_thread(server.start)
    server_pid = server.pid
    if server_pid is None:
        raise PdmeshError("the server has ended")
    children: list[Child] = []
    try:
        options = [f"nats_url={server.url}", f"keep_ended_s={settings.keep_ended_s}", *settings.overrides]
        broker = ("-m", "services.broker", *(word for each in options for word in ("--set", each)))
        for name, command in (("workers", ("-m", "loadtest.control_workers", server.url)), ("broker", broker)):
            spec = ChildSpec(
                name=name,
                command=(sys.executable, *command),
                environ=environment(),
                log=folder / f"{name}.log",
                stage=0,
                drain_s=_DRAIN_S,
            )
            children.append(await Child.start(spec))
        async with asyncio.TaskGroup() as group:
            bus = await NatsBus.connect(server.url, name=_ROUTER, tasks=group, clock=clock, log=structlog.get_logger())
            try:
                await _wait_ready(bus, children, Deadline.after(clock, _START_S), clock)
                yield bus, group, Pids(broker=children[-1].pid, server=server_pid)
            finally:
                await bus.close()
    finally:
        for child in reversed(children):
            await child.stop()
        await asyncio.to_thread(server.stop)


async def _wait_ready(bus: Bus, children: list[Child], deadline: Deadline, clock: Clock) -> None:
    """Until the broker answers, and the workers do. Raises `PdmeshError` when one ends or the time is over."""
    while not deadline.passed:
        for child in children:
            if child.status is not None:
                raise PdmeshError("\n".join([f"{child.spec.name} has ended:", *child.last_lines()]))
        try:
            reply = await bus.request(subjects.broker_rpc(BrokerVerb.PING), encode(Ping()), timeout=1.0)
            decode(reply.data, Pong)
            release = subjects.worker_rpc(WorkerRole.DECODE, DECODE.worker_id, WorkerVerb.RELEASE)
            await bus.request(
                release, encode(ReleaseHandoff(handoff_id="none", reason="", tombstone_ms=0)), timeout=1.0
            )
        except BusError:
            await clock.sleep(_POLL_S)
        else:
            return
    raise PdmeshError("the broker and its workers did not start in time")


async def _ask(bus: Bus, subject: str, message: msgspec.Struct, timeout_s: float) -> None:
    reply = await bus.request(subject, encode(message), timeout=timeout_s)
    answer: Accepted | Refused = decode(reply.data, Accepted | Refused)  # type: ignore[arg-type]  # a union is not a type
    if isinstance(answer, Refused):
        raise PdmeshError.from_info(answer.error)


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, of all its threads."""
    fields = (Path("/proc") / str(pid) / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
