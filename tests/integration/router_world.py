"""A router between an HTTP client and a scripted mesh: a broker and workers that do what a test says, over a real bus."""

import asyncio
import base64
import contextlib
import functools
import io
import json
import os
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import structlog
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.bus.kept_record import PUT_EVERY_S
from common.bus.memory import MemoryServer
from common.bus.port import Bucket, Bus, Message
from common.bus.storage import LINKS_CONFIG, WORKERS_CONFIG
from common.runtime.clock import SystemClock
from common.runtime.lifecycle import Lifecycle, serve
from common.runtime.metrics import Metrics
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.links import LinkRecord, LinkState
from contracts.requests import (
    Accepted,
    CancelRequest,
    CancelWork,
    FinishReason,
    Pong,
    PromptFrame,
    Refused,
    ReplayTokens,
    SubmitRequest,
    TokenFrame,
    WorkerRef,
)
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState
from services.router import app
from services.router.settings import RouterSettings

VOCAB_SIZE = 320
MAX_POSITION = 60_000
PATIENCE_S = 20.0
ANSWER = "Hello, wörld! It is 😀 here."
LONG_TEXT = "=" * 4000
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

Script = Callable[["Mesh", SubmitRequest], Awaitable[None]]


@functools.lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """A small byte-level BPE tokenizer; its special tokens have the last ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["hello world, it is here and there " * 20], trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    made.add_tokens([AddedToken(LONG_TEXT, special=False, normalized=False)])
    return made


def encode_text(text: str) -> list[int]:
    """Ids of a text."""
    return list(tokenizer().encode(text).ids)


def write_model(folder: Path) -> Path:
    """A checkpoint's directory as far as the router reads it."""
    folder.mkdir(parents=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    end, _, turn_end = (tokenizer().token_to_id(text) for text in _SPECIAL)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITION, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn_end]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def record(worker_id: str, **fields: Any) -> WorkerRecord:
    """A ready worker of the test model; its role is the beginning of its id."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"i{worker_id}",
        "role": WorkerRole(worker_id.split("-", maxsplit=1)[0]),
        "state": WorkerState.READY,
        "model": "tiny",
        "model_fingerprint": "f",
        "tp": 1,
        "dp": 1,
        "dcp": 1,
        "block_size": 16,
        "num_blocks": 10_000,
        "num_slots": 8,
        "max_sequence_tokens": MAX_POSITION,
        "load": WorkerLoad(num_free_blocks=10_000, num_free_slots=8, num_waiting=0, num_running=0),
    }
    return WorkerRecord(**(values | fields))


def linked_pair() -> list[WorkerRecord | LinkRecord]:
    """One prefill worker that is linked to one decode worker."""
    link = LinkRecord(
        prefill=WorkerRef(worker_id="prefill-0", incarnation="iprefill-0"),
        decode=WorkerRef(worker_id="decode-0", incarnation="idecode-0"),
        state=LinkState.LINKED,
        since="2030-01-01T00:00:00+00:00",
    )
    return [record("prefill-0"), record("decode-0"), link]


async def whole_answer(mesh: "Mesh", submit: SubmitRequest) -> None:
    """Send the mesh's answer behind what was delivered, cut off after max_tokens, in two frames."""
    first = submit.num_delivered_tokens
    tokens = mesh.answer[: first + submit.sampling.max_tokens]
    cut = len(mesh.answer) > len(tokens)
    await mesh.send(submit, first, tokens[first : first + 1])
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    await mesh.send(submit, first + 1, tokens[first + 1 :], final=True, num_tokens=len(tokens), finish_reason=reason)


async def one_token(mesh: "Mesh", submit: SubmitRequest) -> None:
    """Begin an answer and go silent."""
    await mesh.send(submit, 0, mesh.answer[:1])


async def silence(mesh: "Mesh", submit: SubmitRequest) -> None:
    """Accept, and never say anything."""


class Mesh:
    """Plays broker and workers, and remembers all that it was told. Each submit runs the next script, the last for ever."""

    def __init__(self, bus: Bus, group: asyncio.TaskGroup) -> None:
        self.bus = bus
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()
        self.answer: Sequence[int] = encode_text(ANSWER)
        self.scripts: list[Script] = [whole_answer]
        self.refuse_prompts: list[ErrorInfo] = []
        self.refuse_submits: list[ErrorInfo] = []
        self.num_cached_tokens = 0
        self.prompt_subjects: list[str] = []
        self.frames: dict[str, dict[int, PromptFrame]] = {}
        self.submits: list[SubmitRequest] = []
        self.broker_answers = True
        self.max_timeout_ms = 3_600_000
        self.cancels: list[CancelRequest] = []
        self.hints: list[tuple[str, CancelWork]] = []
        self.hold_prompts: asyncio.Event | None = None
        self.replays: list[tuple[str, bytes]] = []
        self.replay: Callable[[str, ReplayTokens], msgspec.Struct | None] | None = None
        """What a role (prefill, decode, mixed, broker) answers to a question for tokens; None: nothing."""
        self._changed = asyncio.Event()

    async def open(self, records: Sequence[WorkerRecord | LinkRecord]) -> None:
        """Listen, register workers, and link them."""
        calls = await self.bus.subscribe("pd.v1.rpc.>")
        hints = await self.bus.subscribe("pd.v1.cancel.>")
        self._start(self._serve(calls), name="mesh-calls")
        self._start(self._listen(hints), name="mesh-hints")
        buckets = (await self.bus.ensure_bucket(WORKERS_CONFIG), await self.bus.ensure_bucket(LINKS_CONFIG))
        await self._register(*buckets, records)
        self._start(self._stay_registered(*buckets, records), name="mesh-registration")

    def close(self) -> None:
        """End all that it does."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what the mesh was told meets a condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def send(self, submit: SubmitRequest, index: int, token_ids: Sequence[int], **fields: Any) -> None:
        """Send a token frame to the router."""
        frame = TokenFrame(
            handoff_id=submit.handoff_id,
            request_id=submit.request_id,
            attempt=fields.pop("attempt", submit.attempt),
            index=index,
            token_ids=tuple(token_ids),
            num_cached_tokens=self.num_cached_tokens,
            **fields,
        )
        await self.bus.publish(subjects.tokens(submit.router_id, submit.request_id), encode(frame))

    def prompt_of(self, handoff_id: str) -> list[int]:
        """Ids of a prompt, put together from its frames."""
        frames = self.frames[handoff_id]
        packed = b"".join(base64.b64decode(frames[index].ids_b64) for index in sorted(frames))
        return list(array("I", packed))

    async def _register(self, workers: Bucket, links: Bucket, records: Sequence[WorkerRecord | LinkRecord]) -> None:
        for each in records:
            if isinstance(each, WorkerRecord):
                await workers.put(each.worker_id, encode(each))
            else:
                await links.put(subjects.link_key(each.prefill.worker_id, each.decode.worker_id), encode(each))

    async def _stay_registered(
        self, workers: Bucket, links: Bucket, records: Sequence[WorkerRecord | LinkRecord]
    ) -> None:
        """Do as workers do, so that a slow machine does not make them disappear."""
        while True:
            await asyncio.sleep(PUT_EVERY_S)
            await self._register(workers, links, records)

    async def _serve(self, calls: Any) -> None:
        async for message in calls:
            self._start(self._call(message), name=message.subject)

    async def _call(self, message: Message) -> None:
        verb = subjects.verb_of(message.subject)
        if verb == "prompt":
            frame = decode(message.data, PromptFrame)
            self.prompt_subjects.append(message.subject)
            self.frames.setdefault(frame.handoff_id, {})[frame.index] = frame
            self._changed.set()
            if self.hold_prompts is not None:
                await self.hold_prompts.wait()
            await self._answer(message, frame.handoff_id, self.refuse_prompts)
        elif verb == "submit":
            submit = decode(message.data, SubmitRequest)
            self.submits.append(submit)
            if await self._answer(message, submit.handoff_id, self.refuse_submits):
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                await script(self, submit)
        elif verb == "cancel":
            cancel = decode(message.data, CancelRequest)
            self.cancels.append(cancel)
            await self._answer(message, cancel.handoff_id, [])
        elif verb in {"replay", "outcome"}:
            await self._replayed(message)
        elif verb == "ping" and self.broker_answers:
            await message.respond(encode(Pong(broker_id="broker-0", max_timeout_ms=self.max_timeout_ms)))
        self._changed.set()

    async def _replayed(self, message: Message) -> None:
        self.replays.append((message.subject, message.data))
        asked = decode(message.data, ReplayTokens)
        answer = None if asked.ended or self.replay is None else self.replay(message.subject.split(".")[3], asked)
        if answer is not None:
            await message.respond(encode(answer))

    async def _answer(self, message: Message, handoff_id: str, refusals: list[ErrorInfo]) -> bool:
        if refusals:
            await message.respond(encode(Refused(handoff_id=handoff_id, error=refusals.pop(0))))
            return False
        await message.respond(encode(Accepted(handoff_id=handoff_id)))
        return True

    async def _listen(self, hints: Any) -> None:
        async for message in hints:
            self.hints.append((message.subject, decode(message.data, CancelWork)))
            self._changed.set()


class World:
    """What a test works with."""

    def __init__(
        self, mesh: Mesh, lifecycle: Lifecycle, url: str, session: aiohttp.ClientSession, metrics: Metrics
    ) -> None:
        self.metrics = metrics
        self.mesh = mesh
        self.lifecycle = lifecycle
        self.url = url
        self.session = session

    def client(self) -> openai.AsyncOpenAI:
        """The official client, without its own retries. Close it."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any], Any]:
        """Post JSON (or bytes, as they are); return status, answer and headers."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(f"{self.url}{path}", data=data, **options) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        """Get JSON."""
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Post, and return the events of the stream, parsed; the last one is [DONE] as it stands."""
        async with self.session.post(f"{self.url}{path}", json={**body, "stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            blocks = (await response.text()).split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [*(json.loads(each) for each in data[:-1]), data[-1]]


def overloaded(message: str = "full") -> ErrorInfo:
    """A refusal that another attempt may cure."""
    return ErrorInfo(code=ErrorCode.OVERLOADED, message=message)


@contextlib.asynccontextmanager
async def router_world(
    tmp_path: Path,
    *,
    records: Sequence[WorkerRecord | LinkRecord] | None = None,
    buses: tuple[Bus, Bus] | None = None,
    exit_status: int = 0,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run a router until the test leaves the context, then drain it and check its exit status."""
    clock = SystemClock()
    server = MemoryServer(clock)
    mesh_bus, router_bus = buses or (server.connect(), server.connect())
    defaults: dict[str, Any] = {"retry_delay_s": 0.001, "max_retry_delay_s": 0.002, "port": 0}
    chosen = RouterSettings(model=write_model(tmp_path / "tiny"), **(defaults | settings))
    log, metrics = structlog.get_logger(), Metrics()
    started: asyncio.Future[tuple[Lifecycle, int]] = asyncio.get_running_loop().create_future()

    async def main(lifecycle: Lifecycle) -> None:
        port = await app.start(
            chosen, lifecycle, bus=router_bus, clock=clock, log=log, registry=metrics, entropy=os.urandom
        )
        started.set_result((lifecycle, port))

    async with asyncio.TaskGroup() as mesh_group:
        mesh = Mesh(mesh_bus, mesh_group)
        await mesh.open(linked_pair() if records is None else records)
        async with asyncio.TaskGroup() as group:
            life = group.create_task(
                serve(main, log=log, drain_timeout_s=chosen.drain_timeout_s, handle_signals=False), name="router"
            )
            async with asyncio.timeout(PATIENCE_S):
                lifecycle, port = await started
            async with aiohttp.ClientSession() as session:
                world = World(mesh, lifecycle, f"http://127.0.0.1:{port}", session, metrics)
                await _until_known(world, len(linked_pair() if records is None else records))
                yield world
            lifecycle.request_drain("the test is over")
            async with asyncio.timeout(PATIENCE_S):
                assert await life == exit_status
        mesh.close()


async def _until_known(world: World, count: int) -> None:
    """Wait until the router has heard of the workers: it is ready then, or it never will be."""
    async with asyncio.timeout(PATIENCE_S):
        while count and (await world.get("/ready"))[0] != 200:
            pass
