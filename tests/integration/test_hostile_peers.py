"""A stranger on the bus sends everything that is no message, to everybody who listens: nobody dies, nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from common.bus.storage import LEASES_CONFIG, LINKS_CONFIG, ROUTERS_CONFIG, WORKERS_CONFIG, handoffs_config
from common.schemas.asyncapi import address
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.handoff import ReleaseHandoff
from contracts.operations import OPERATIONS, Operation, Service
from contracts.requests import Refused, TokenFrame
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole
from services.broker.settings import BrokerSettings
from tests.contract.golden_samples import BUS_MESSAGES
from tests.integration.hostile_mesh import (
    HostileMesh,
    expected,
    mesh_over,
    request_body,
)
from tests.integration.hostile_payloads import payloads

OVER = pytest.mark.parametrize("network", ["memory", "nats"])
CALLS: Final = [each for each in OPERATIONS if each.answers]
TOLD: Final = [each for each in OPERATIONS if each.receivers and not each.answers and not each.key]
KEPT: Final = [each for each in OPERATIONS if each.receivers and each.key]
BUCKETS: Final = {
    "workers": WORKERS_CONFIG,
    "links": LINKS_CONFIG,
    "routers": ROUTERS_CONFIG,
    "who leads": LEASES_CONFIG,
    "handoff state": handoffs_config(BrokerSettings().record_ttl_s),
}


def subject_for(operation: Operation, receiver: Service) -> str:
    """Where one service of the mesh hears an operation."""
    worker = f"{receiver}-0"
    names = {"role": str(receiver), "worker": worker, "partition": "0", "router": "router-0"}
    return address(operation).format(**names, request="r1", handoff="r1-0")


async def while_serving(mesh: HostileMesh, bombard: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Serve requests one after the other while the stranger is at work, each whole and right; return how many."""
    served = 0
    async with asyncio.TaskGroup() as group:
        attack = group.create_task(bombard())
        while not attack.done() or not served:
            served += 1
            assert await mesh.stream(served, 60) == expected(served, 60)
    return served


@OVER
async def test_every_call_refuses_what_is_no_message_and_names_the_field(tmp_path: Path, network: str) -> None:
    """Each verb of each service: an answer always comes, with the field at fault; what can be read is never an inner error."""
    async with mesh_over(network, tmp_path) as mesh:
        refused: set[str] = set()

        async def ask(operation: Operation, receiver: Service) -> None:
            subject = subject_for(operation, receiver)
            for payload in payloads(operation.messages[0], by_field=network == "memory"):
                data = await mesh.stranger.ask(subject, payload.data)
                answer: Any = decode(data, _either(operation))
                if payload.refusal is None:
                    code = answer.error.code if isinstance(answer, Refused) else None
                    assert code is not ErrorCode.INTERNAL, (subject, payload.name, answer)
                    continue
                refused.add(payload.name)
                assert isinstance(answer, Refused), (subject, payload.name)
                assert answer.error.code is ErrorCode.PROTOCOL, (subject, payload.name, answer)
                assert answer.error.param == payload.refusal.param, (subject, payload.name)
                assert len(answer.error.message) < 1000

        async def bombard() -> None:
            async with asyncio.TaskGroup() as group:
                for operation in CALLS:
                    for receiver in operation.receivers:
                        group.create_task(ask(operation, receiver), name=operation.name)

        await while_serving(mesh, bombard)
        wanted = {
            "binary",
            "truncated",
            "newer version",
            "unknown tag",
            "no tag",
            "too large",
            "no fields",
        }
        assert wanted - refused == set()
        await _release_all(mesh)
        await mesh.settled()
        mesh.assert_unharmed()


@OVER
async def test_what_nobody_answers_is_counted_and_logged_once(tmp_path: Path, network: str) -> None:
    """Parts, tokens, cancels: garbage by the hundred gives one log line a reader, and a figure that says how many."""
    async with mesh_over(network, tmp_path) as mesh:
        assert TOLD
        sent: dict[tuple[Service, str], int] = {}

        async def bombard() -> None:
            for operation in TOLD:
                for receiver in operation.receivers:
                    for payload in payloads(operation.messages[0], by_field=network == "memory"):
                        await mesh.stranger.send(subject_for(operation, receiver), payload.data)
                        is_untrue = operation.row == "parts done"  # of a handoff that nobody knows
                        if payload.refusal is not None or is_untrue:
                            key = (receiver, operation.row)
                            sent[key] = sent.get(key, 0) + 1

        await while_serving(mesh, bombard)
        for (receiver, row), count in sent.items():
            counted = await mesh.refused_of(receiver, row, at_least=count)
            # Of token frames that can be read, those that contradict themselves are counted, too.
            assert counted == count > 10 or row == "tokens"
        lines = [(line["row"], line["subject"]) for line in mesh.log.of("message_refused")]
        assert len(lines) == len(set(lines)) == len(sent)
        await _release_all(mesh)
        await mesh.settled()
        mesh.assert_unharmed()


@OVER
async def test_records_of_a_stranger_are_passed_over(tmp_path: Path, network: str) -> None:
    """Garbage at keys of its own and at keys of ours, and records that speak for others: routes and links stay as they were."""
    async with mesh_over(network, tmp_path) as mesh:
        keys = {
            "workers": ("stranger-0", "decode-0"),
            "links": ("x.y", "prefill-0.decode-0"),
            "routers": ("stranger-0", "router-0"),
            "handoff state": ("x-0",),
            "who leads": ("broker.9",),
        }
        sent = 0

        async def bombard() -> None:
            nonlocal sent
            for operation in KEPT:
                bucket = await mesh.stranger.bus.ensure_bucket(BUCKETS[operation.row])
                for key in keys[operation.row]:
                    for payload in payloads(operation.messages[0], by_field=network == "memory"):
                        ours = key in {"decode-0", "prefill-0.decode-0", "router-0"}
                        if len(payload.data) <= 100_000 and not (ours and payload.refusal is None):
                            await bucket.put(key, payload.data)
                            sent += 1
            workers = await mesh.stranger.bus.ensure_bucket(WORKERS_CONFIG)
            await workers.put("stranger-1", encode(mesh.workers["decode-0"].record()))

        await while_serving(mesh, bombard)
        assert sent > 50
        for receiver in (Service.ROUTER, Service.BROKER, Service.PREFILL):
            assert mesh.counted(receiver, "messages_refused_total", row="workers") > 0
        for receiver in (Service.PREFILL, Service.DECODE, Service.MIXED):
            assert mesh.counted(receiver, "messages_refused_total", row="routers") > 0
        async with mesh.session.get(f"{mesh.url}/ready") as response:
            assert response.status == 200, await response.text()
        await mesh.settled()
        mesh.assert_unharmed()


async def test_a_worker_that_is_none_does_not_keep_requests(tmp_path: Path) -> None:
    """A record with all the room in the world, for a worker that nobody is: requests that try it are served elsewhere."""
    async with mesh_over("memory", tmp_path) as mesh:
        record = mesh.workers["mixed-0"].record()
        free = replace(record.load, num_free_blocks=10**9, num_free_slots=10**9)
        workers = await mesh.stranger.bus.ensure_bucket(WORKERS_CONFIG)
        for changes in ({}, {"role": WorkerRole.DECODE, "tp": 10**9, "dp": 10**9}, {"num_slots": 0, "block_size": 0}):
            worker_id = f"nobody-{len(changes)}"
            values = {"load": free, "worker_id": worker_id, "incarnation": "i-nobody", **changes}
            await workers.put(worker_id, encode(replace(record, **values)))
        for seed in range(1, 7):
            assert await mesh.stream(seed, 10) == expected(seed, 10)
        await mesh.settled()
        mesh.assert_unharmed()


async def test_a_handoff_whose_record_is_overwritten_ends_in_so_many_words(tmp_path: Path) -> None:
    """The truth about one request is gone: that request ends with an error or as it should, all others go on."""
    async with mesh_over("memory", tmp_path) as mesh:
        bucket = await mesh.stranger.bus.ensure_bucket(BUCKETS["handoff state"])
        async with mesh.session.post(f"{mesh.url}/v1/completions", json=request_body(1, 400)) as response:
            first = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            request = first["id"].removeprefix("cmpl-")
            await bucket.put(f"{request}-0", b"\xff not a record")
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")
        assert await mesh.stream(2, 10) == expected(2, 10)
        await mesh.settled()
        mesh.assert_unharmed()


@OVER
async def test_token_frames_of_others_change_nothing(tmp_path: Path, network: str) -> None:
    """Frames of another request, attempt or handoff, repeats, and frames after the end: the stream is what its worker said."""
    async with mesh_over(network, tmp_path) as mesh:
        seed, num_tokens = 3, 300
        tokens = expected(seed, num_tokens)
        async with mesh.session.post(f"{mesh.url}/v1/completions", json=request_body(seed, num_tokens)) as response:
            first = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            request = first["id"].removeprefix("cmpl-")
            own = TokenFrame(
                handoff_id=f"{request}-0", request_id=request, attempt=0, index=0, token_ids=tuple(tokens[:1])
            )
            subject = subjects.tokens("router-0", request)
            frames = (
                own,
                replace(own, token_ids=()),
                replace(own, attempt=1, index=7, token_ids=(1,) * 50),
                replace(own, handoff_id="r9-0", index=2, token_ids=(9,) * 50),
                replace(own, handoff_id="r9-0", index=10**6, final=True, num_tokens=3, finish_reason="stop"),
                replace(own, request_id="r9", handoff_id="r9-0", index=1, token_ids=(5,)),
            )
            for frame in frames:
                await mesh.stranger.send(subject, encode(frame))
            blocks = (await response.text()).split("\n\n")
            for frame in frames:
                await mesh.stranger.send(subject, encode(frame))
        chunks = [first, *(json.loads(block.removeprefix("data: ")) for block in blocks[:-2])]
        assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == tokens
        await mesh.until(lambda: mesh.counted(Service.ROUTER, "messages_refused_total", row="tokens") == 8)
        assert await mesh.stream(4, 20) == expected(4, 20)
        await mesh.settled()
        mesh.assert_unharmed()


@OVER
async def test_an_answer_to_nowhere_and_to_a_service_ends_there(tmp_path: Path, network: str) -> None:
    """A reply subject that cannot be used is the asker's loss; one that is a service's gets no answer to the answer."""
    async with mesh_over(network, tmp_path) as mesh:
        subject = subjects.worker_rpc(WorkerRole.DECODE, "decode-0", WorkerVerb.SCAN)
        for reply in ("stranger.*", "pd.v1.rpc.broker.0.submit", subject, "pd.v1.tok.router-0.r1", "x" * 2000):
            await mesh.stranger.send(subject, b"{", reply)
        assert await mesh.stream(5, 20) == expected(5, 20)
        await mesh.settled()
        mesh.assert_unharmed()


async def test_every_service_answers_to_the_verbs_of_the_table_and_to_no_other(tmp_path: Path) -> None:
    """So that the tests above reach all there is: a handler without an operation would be tested by nobody."""
    async with mesh_over("memory", tmp_path) as mesh:
        for worker in mesh.workers.values():
            named = {each.verb for each in CALLS if Service(worker.role) in each.receivers}
            assert set(worker.handlers()) == named


def _either(operation: Operation) -> Any:
    union: Any = Refused
    for kind in operation.answers:
        union |= kind
    return union


async def _release_all(mesh: HostileMesh) -> None:
    """Let go of what the stranger's readable messages began."""
    names = {getattr(message, "handoff_id", "r1-0") for message in BUS_MESSAGES}
    for worker_id, worker in mesh.workers.items():
        for name in names:
            release = ReleaseHandoff(handoff_id=name, reason="the test is over", tombstone_ms=0)
            await mesh.stranger.ask(subjects.worker_rpc(worker.role, worker_id, WorkerVerb.RELEASE), encode(release))
