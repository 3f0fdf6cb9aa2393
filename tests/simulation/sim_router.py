"""A router without HTTP: everything between a checked request and its pieces, with clients that check what they get."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final

from common.bus.kept_record import KeptRecord
from common.bus.port import Bus
from common.bus.refusals import Refusals
from common.bus.storage import ROUTERS_CONFIG
from common.engine.fake.engine import EOS_TOKEN_ID
from common.engine.fake.tokens import VOCAB_SIZE, fake_token
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.tasks import BoundedTasks
from contracts import ids
from contracts.codec import encode
from contracts.errors import PdmeshError
from contracts.requests import FinishReason, SamplingParams
from contracts.routers import RouterRecord
from services.router.admission import Admission
from services.router.canceller import Canceller
from services.router.core.placement import Loads, candidates
from services.router.core.prompt_frames import pack_ids, prompt_hash
from services.router.core.remainder import Remainder
from services.router.core.retry import RetryPolicy
from services.router.core.retry_budget import RetryBudget
from services.router.core.vocabulary import Vocabulary
from services.router.dispatch import Dispatcher, Job
from services.router.fleet import Fleet
from services.router.generation import Generator, Progress
from services.router.interruption import Interruptible, SlowReaderError
from services.router.metrics import RouterMetrics
from services.router.replaying import Replayer
from services.router.token_inbox import TokenInbox
from services.router.twin import check_unique
from tests.simulation.schedule import Ask
from tests.simulation.silent_metrics import SilentMetrics
from tests.simulation.verdicts import Verdicts

MODEL = "fake"
REROUTE_WAIT_S: Final = 5.0
_MAX_REQUESTS: Final = 64
_STREAMS_SHARE: Final = 0.8
_LAST_WORDS_SHARE: Final = 0.1
_VOCABULARY = Vocabulary(vocab={}, added={}, silent=(), vocab_size=VOCAB_SIZE)


@dataclass(eq=False)
class Client:
    """What one client asked, and what it got. `ended` says how it ended: a finish reason, an error's code, or in words."""

    ask: Ask
    verdicts: Verdicts
    token_ids: list[int] = field(default_factory=list)
    ended: str = ""
    task: asyncio.Task[None] | None = None
    asked_at: float = 0.0
    """When its request was sent to a router; 0.0 while it waits for one to be there."""
    due: float = 0.0
    """When it has to have ended, by the router's own reckoning; 0.0 while the router has not heard of it."""
    has_answer: bool = False
    """Whether it got the whole of it, and its finish reason."""
    moved_at: float = 0.0
    """When it got its last token; before the first, when the router heard of it."""

    def begin(self, now: float) -> None:
        """The router has heard of it."""
        self.moved_at, self.due = now, now + self.ask.timeout_s

    async def take(self, progress: Progress) -> None:
        """The sink: tokens are the engine's, each once and in order, and the answer is as long as it was to be.

        No engine here draws the end of a sequence, and nobody asks for a stop: every answer ends with its length.
        """
        if self.has_answer:
            self.verdicts.broken("I4", f"request {self.ask.number} goes on behind its end")
        if progress.token_ids and self.verdicts.clock is not None:
            self.moved_at = self.verdicts.clock.monotonic()
        for token in progress.token_ids:
            position = self.ask.num_prompt_tokens + len(self.token_ids)
            if token != fake_token(self.ask.seed, position):
                index = len(self.token_ids)
                self.verdicts.broken("I4", f"request {self.ask.number}: token {index} is {token}, which it is not")
            self.token_ids.append(token)
        if len(self.token_ids) > self.ask.max_tokens:
            self.verdicts.broken(
                "I4", f"request {self.ask.number}: {len(self.token_ids)} tokens of {self.ask.max_tokens}"
            )
        if progress.finish_reason is None:
            return
        if progress.finish_reason is not FinishReason.LENGTH or len(self.token_ids) != self.ask.max_tokens:
            text = f"request {self.ask.number} ended with {len(self.token_ids)} tokens: {progress.finish_reason}"
            self.verdicts.broken("I4", text)
        self.has_answer = True
        self.end(str(progress.finish_reason))

    def let_go(self, task: asyncio.Task[None]) -> None:
        """Its router does no more for it: because it left, also before that had begun, or because it has ended otherwise."""
        if not (self.ended or task.cancelled()):
            self.verdicts.broken("I5", f"request {self.ask.number} was let go of without an end")
        self.end("left")

    def end(self, how: str) -> None:
        """It has ended. The first time counts."""
        if not self.ended:
            self.ended = how
            self.verdicts.saw(f"request:{how}")
            self.verdicts.say("client", f"request {self.ask.number} ended: {how}, {len(self.token_ids)} tokens")


class SimulatedRouter:
    """One start of a router."""

    def __init__(  # noqa: PLR0917 - a process's ports
        self,
        generator: Generator,
        admission: Admission,
        cancels: BoundedTasks,
        lease: KeptRecord,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._generator = generator
        self._admission = admission
        self._cancels = cancels
        self._lease = lease
        self._clock = clock
        self._rng = rng

    @property
    def generator(self) -> Generator:
        """What serves its requests."""
        return self._generator

    @property
    def has_route(self) -> bool:
        """Whether a request could be placed now."""
        return any(True for _ in candidates(self._generator.fleet.view(), model=MODEL))

    @property
    def unrest(self) -> str:
        """What it still keeps of requests; "" when there is nothing."""
        counts, boxes = self._generator.loads.counts, self._generator.inbox._mailboxes
        return f"{sum(counts.values())} requests count on workers, {len(boxes)} mailboxes" if counts or boxes else ""

    @property
    def is_draining(self) -> bool:
        """Whether it takes no requests any more."""
        return self._admission.draining

    async def drain(self, limit_s: float) -> None:
        """What `services.router.app` does when it drains: let streams end, end the others, let cancels be heard."""
        if not await self._admission.drain(Deadline.after(self._clock, limit_s * _STREAMS_SHARE)):
            self._admission.interrupt_all()
            await self._admission.drain(Deadline.after(self._clock, limit_s * _LAST_WORDS_SHARE))
        await self._cancels.wait_idle(Deadline.after(self._clock, limit_s * _LAST_WORDS_SHARE))

    async def close(self) -> None:
        """Take its leave: its record goes."""
        await self._lease.close()

    async def serve(self, client: Client) -> None:
        """Serve one request to its end."""
        ask = client.ask
        deadline = Deadline.after(self._clock, ask.timeout_s)
        client.begin(self._clock.monotonic())
        scope = Interruptible(deadline)
        packed = pack_ids(tuple(1 + (ask.number + place) % (VOCAB_SIZE - 1) for place in range(ask.num_prompt_tokens)))
        job = Job(
            request_id=ids.request_id(self._rng.randbytes(ids.ENTROPY_BYTES)),
            whole=Remainder(
                packed=packed,
                digest=prompt_hash(packed),
                sampling=SamplingParams(max_tokens=ask.max_tokens, seed=ask.seed, temperature=ask.temperature),
            ),
            stops=(),
        )
        client.verdicts.say("client", f"request {ask.number} is {job.request_id}")
        try:
            with self._admission.enter(1), self._admission.interruptible(scope):
                async with scope:
                    await self._generator.run(job, deadline, client.take, scope)
        except PdmeshError as error:
            if isinstance(error, SlowReaderError):  # a client takes at once what it gets
                client.verdicts.broken("I7", f"request {ask.number}: {error.message}")
            client.end(str(error.code))
        except asyncio.CancelledError:
            client.end("left")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
            client.verdicts.broken("no mistakes", f"request {ask.number}: {error!r}")
            client.end("crashed")


async def open_router(  # noqa: PLR0917 - a process's ports
    router_id: str, bus: Bus, clock: Clock, log: Log, group: asyncio.TaskGroup, rng: random.Random
) -> SimulatedRouter:
    """What `services.router.app.start` puts together, without HTTP. Raises `BusError`."""
    registry = SilentMetrics()
    metrics = RouterMetrics(registry)
    await check_unique(router_id, bus, log)
    incarnation = rng.randbytes(8).hex()
    sign = RouterRecord(router_id=router_id, incarnation=incarnation)
    lease = KeptRecord(bus, log, ROUTERS_CONFIG, lambda: (router_id, encode(sign)))
    await lease.open()
    group.create_task(lease.run(), name="lease")
    refusals = Refusals(log, clock, registry)
    fleet = Fleet(bus, clock, refusals)
    inbox = TokenInbox(bus, refusals, router_id=router_id, max_waiting_frames=1024)
    workers, links = await fleet.open()
    group.create_task(fleet.run_workers(workers), name="fleet-workers")
    group.create_task(fleet.run_links(links), name="fleet-links")
    group.create_task(inbox.run(await inbox.open()), name="token-inbox")
    group.create_task(inbox.run_nudges(), name="token-nudges")

    def failed(name: str, error: Exception) -> None:
        log.error("cancel_failed", task=name, error=repr(error))

    cancels = BoundedTasks(group, name="cancel", limit=4096, on_error=failed)
    acknowledgements = BoundedTasks(group, name="acknowledge", limit=4096)
    generator = Generator(
        model=MODEL,
        vocabulary=_VOCABULARY,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        fleet=fleet,
        inbox=inbox,
        dispatcher=Dispatcher(
            bus, clock, router_id=router_id, incarnation=incarnation, call_timeout_s=0.5, outage_patience_s=3.0
        ),
        canceller=Canceller(bus, clock, log, cancels, timeout_s=30.0),
        replayer=Replayer(bus, metrics, acknowledgements, view=fleet.view),
        policy=RetryPolicy(max_attempts=4, max_failures=8, max_preemptions=64, first_delay_s=0.05, max_delay_s=1.0),
        budget=RetryBudget(share=0.1, floor_per_s=2.0, capacity=64, now=clock.monotonic()),
        reroute_wait_s=REROUTE_WAIT_S,
        loads=Loads(),
        metrics=metrics,
        clock=clock,
        log=log,
        rng=rng,
    )
    admission = Admission(metrics, limit=_MAX_REQUESTS)
    return SimulatedRouter(generator, admission, cancels, lease, clock, rng)
