"""Real ranks, one of which cannot push: its sequence fails, and nothing else does, on any rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.dataplane.shm_remote import ShmRemoteRegion
from common.engine.transfer import push_lane
from common.engine.transfer.push_lane import PushLane
from contracts.handoff import Grant
from contracts.rank import PartPushed, PushOutcome, StepItem
from contracts.requests import SamplingParams
from tests.integration.handoff_pairs import Worker, bind_all, hand_over, link, prefill_all, start_worker

PATIENCE_S = 60.0
SAMPLING = SamplingParams(max_tokens=8, seed=1, temperature=0.0, ignore_eos=True)
MAX_QUEUED = 8
"""What a rank owes of a prompt of one chunk: KEY and VALUE of the one layer that has them, two states of each of the other three."""


@asynccontextmanager
async def workers(folder: Path, sockets: Path, *names: str) -> AsyncIterator[tuple[Worker, list[Worker]]]:
    """A source of two ranks, and destinations of one rank that it is linked with."""
    started: list[Worker] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            source = await start_worker("p", folder, sockets, 2)
            started.append(source)
            for name in names:
                started.append(await start_worker(name, folder, sockets, 1))
                await link(source, started[-1])
            yield source, started[1:]
    finally:
        for worker in started:
            await worker.group.stop()


def items(seq: int, prompt: tuple[int, ...], start: int, end: int) -> list[StepItem]:
    """A piece of a prompt, as a step takes it."""
    last = end == len(prompt)
    piece = prompt[start:end]
    return [StepItem(seq=seq, start=start, num_tokens=len(piece), token_ids=piece, sample=last, last_chunk=last)]


async def rest_of(source: Worker) -> list[PartPushed]:
    """The reports that have come and were not read. Behind the release of a sequence no more come of it."""
    found: list[PartPushed] = []
    try:
        async with asyncio.timeout(0):
            while True:
                found.append(await source.group.next_push())
    except TimeoutError:
        return found


async def release(worker: Worker, *seqs: int) -> None:
    """Give all memory of sequences back, at once."""
    assert await worker.group.release(seqs, worker.next_generation(), 5000) == frozenset()


@pytest.mark.parametrize("held", [(1,), (0, 1)], ids=["at-one-rank", "at-both"])
async def test_a_slow_peer_with_a_full_queue_fails_its_own_requests_alone(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[int, ...]
) -> None:
    """While A takes nothing, A's prompt fails; the step that it shares with B's ends as ever on all ranks, and B has all of its prompt.

    Once A takes again what it is sent, requests to it are served.
    """
    gate, entered, write = threading.Event(), threading.Semaphore(0), ShmRemoteRegion.write
    slow = {f"pusher-{rank}-a" for rank in held}

    def writes(*arguments: Any) -> Any:
        if threading.current_thread().name in slow:
            entered.release()
            assert gate.wait(PATIENCE_S)
        return write(*arguments)

    monkeypatch.setattr(ShmRemoteRegion, "write", writes)
    monkeypatch.setattr(push_lane, "MAX_QUEUED", MAX_QUEUED)
    to_a, to_b = reference.prompts[3], reference.prompts[1]
    prompts = [to_a.token_ids, to_b.token_ids]
    async with workers(reference.folder, tmp_path, "a", "b") as (source, (a, b)):
        try:
            there = [(await bind_all(each, prompts, SAMPLING, 8))[number] for number, each in enumerate((a, b))]
            await bind_all(source, prompts, SAMPLING, 0, push_to=there)
            await source.run(items(1, prompts[0], 0, 32))
            for _ in held:
                assert await asyncio.to_thread(entered.acquire, timeout=PATIENCE_S)
            await source.run(items(1, prompts[0], 32, 200))
            first = await source.run([*items(1, prompts[0], 200, 300), *items(2, prompts[1], 0, 64)])
            assert first == {1: to_a.output_ids[0], 2: to_b.output_ids[0]}, (
                "nobody computes anything else because of it"
            )
            reports: list[PartPushed] = []
            while not (
                {report.rank for report in reports if report.outcome is not PushOutcome.DONE} == set(held)
                and sum(report.seq == 2 for report in reports) == len(source.plans["b"].parts)
            ):
                reports.append(await source.group.next_push())
            failed = [report for report in reports if report.outcome is not PushOutcome.DONE]
            assert sorted((report.seq, report.rank) for report in failed) == [(1, rank) for rank in held]
            assert {(report.outcome, report.reason) for report in failed} == {
                (PushOutcome.FAILED_QUIESCED, f"the queue to its worker is full: {MAX_QUEUED} pushes wait")
            }
            tokens = [first[2]]
            for position in range(7):
                given = (first[2],) if position == 0 else ()
                item = StepItem(seq=2, start=64 + position, num_tokens=1, token_ids=given, sample=True)
                tokens.append((await b.run([item]))[2])
            assert tuple(tokens) == to_b.output_ids[:8]
        finally:
            gate.set()
        for each in (source, a, b):
            await release(each, 1, 2)
        assert not [report for report in await rest_of(source) if report.outcome is not PushOutcome.DONE]
        assert await hand_over(source, a, [to_b.token_ids], 8) == [to_b.output_ids[:8]]


def in_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport of rank 1 makes a mistake in every write."""
    planted(monkeypatch, ShmRemoteRegion, "write")


def in_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot say what its tasks owe to whom."""
    planted(monkeypatch, PushLane, "_parts_of")


def in_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pusher of rank 1 makes a mistake of its own."""
    planted(monkeypatch, PushLane, "_push")


def planted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a function fail in the pusher's thread of rank 1."""
    function: Callable[..., Any] = getattr(owner, name)

    def fails(*arguments: Any) -> Any:
        if threading.current_thread().name == "pusher-1-d":
            raise RuntimeError("planted")
        return function(*arguments)

    monkeypatch.setattr(owner, name, fails)


async def test_a_mistake_at_one_rank_fails_the_handoff_at_once_and_no_other_one(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported before anybody's deadline, the token is chosen as ever, memory comes back, and the same lane serves the next one."""
    prompt = reference.prompts[1]
    async with workers(reference.folder, tmp_path, "d") as (source, (destination,)):
        assert await hand_over(source, destination, [prompt.token_ids], 8) == [prompt.output_ids[:8]]
        lanes = {thread for thread in threading.enumerate() if thread.name.startswith("pusher-")}
        for plant in (in_transport, in_lookup, in_push):
            caplog.clear()
            with monkeypatch.context() as patch:
                plant(patch)
                there: list[Grant] = await bind_all(destination, [prompt.token_ids], SAMPLING, 8)
                await bind_all(source, [prompt.token_ids], SAMPLING, 0, push_to=there)
                assert await prefill_all(source, [prompt.token_ids]) == {1: prompt.output_ids[0]}
                report = await source.group.next_push()
                while report.outcome is PushOutcome.DONE:
                    report = await source.group.next_push()
                assert (report.rank, report.outcome) == (1, PushOutcome.FAILED_QUIESCED), plant.__name__
                assert report.reason == "RuntimeError: planted"
                for each in (source, destination):
                    await release(each, 1)
            assert {rest.rank for rest in await rest_of(source) if rest.outcome is not PushOutcome.DONE} <= {1}
            assert {str(record.exc_info[1]) for record in caplog.records if record.exc_info} == {"planted"}
            assert await hand_over(source, destination, [prompt.token_ids], 8) == [prompt.output_ids[:8]]
        assert {thread for thread in threading.enumerate() if thread.name.startswith("pusher-")} == lanes
