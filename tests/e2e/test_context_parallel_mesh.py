"""Workers whose ranks share the blocks of a sequence, over HTTP: prompts that come while others decode, a rank that dies, clean ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from services.launcher.ports import free_ports
from tests.e2e.chaos.processes import Processes
from tests.e2e.chaos.rest import unrest_after
from tests.e2e.conftest import MODEL
from tests.e2e.launcher_traces import Traces, short_folder
from tests.e2e.mesh_probe import Probe
from tests.e2e.stream import Stream
from tests.integration.stored_reference import StoredPrompt, load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS: Final = {len(prompt.token_ids): prompt for prompt in load_reference("tiny").prompts}
SHARED: Final = "tp=4,dcp=2,experimental_dcp_chunked_prefill=1"
"""A mixed worker with `mix_batch` as it is by default: on."""
DECODING: Final = tuple(PROMPTS[length] for length in (2, 15, 33, 65))
INJECTED: Final = tuple(PROMPTS[length] for length in (400, 17, 600))
"""Two that take several steps each, and one that takes one."""
NUM_DECODED, NUM_INJECTED = 96, 4
SOAKED: Final = (*DECODING, PROMPTS[129])
_ANSWER_S: Final = 300.0
"""Long answers of many processes take their time on a busy machine."""
NUM_ROUNDS, AT_ONCE, NUM_SOAKED = 20, len(SOAKED), 256


class _Stream(Stream):
    """One greedy completion of a prompt that the reference knows."""

    def __init__(self, prompt: StoredPrompt, max_tokens: int, **fields: Any) -> None:
        super().__init__()
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.fields = fields

    async def run(self, probe: Probe) -> None:
        """Read to the end."""
        await self.read(probe, self.prompt.token_ids, self.max_tokens, timeout_s=_ANSWER_S, **self.fields)

    @property
    def is_right(self) -> bool:
        """Whether it is whole, and begins as the reference does, which knows 64 tokens."""
        expected = list(self.prompt.output_ids[: self.max_tokens])
        return len(self.token_ids) == self.max_tokens and self.token_ids[: len(expected)] == expected


class _Running:
    """A mesh with one mixed worker, and where its worker's figures are."""

    def __init__(self, mesh: Mesh, probe: Probe, admin_port: int) -> None:
        self.mesh = mesh
        self.probe = probe
        self._metrics = f"http://127.0.0.1:{admin_port}/metrics"

    async def steps(self) -> dict[str, int]:
        """How many steps of each mode the worker has computed."""
        async with self.probe.http.get(self._metrics) as response:
            text = await response.text()
        found = re.findall(r'^pdmesh_worker_steps_total\{mode="(\w+)"\} ([\d.e+]+)$', text, re.MULTILINE)
        return {mode: int(float(count)) for mode, count in found}

    async def inject(self) -> Sequence[_Stream]:
        """Prompts one after the other while four others decode: all that there were, to their ends."""
        decoding = [_Stream(prompt, NUM_DECODED) for prompt in DECODING]
        injected = [_Stream(prompt, NUM_INJECTED) for prompt in INJECTED]
        async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.run(self.probe)) for each in decoding]
            for each in decoding:
                await each.until(1, _ANSWER_S)
            for each in injected:
                await each.run(self.probe)
                assert not all(task.done() for task in tasks), "it came too late to be beside anything"
        return [*decoding, *injected]


@asynccontextmanager
async def _mixed(worker: str, *, restart: bool = False) -> AsyncIterator[_Running]:
    """A mesh with one mixed worker, which ends with status 0 and leaves no process, file or shared memory."""
    with short_folder() as folder:
        traces = Traces.watch(folder / "tmp")
        (port,) = free_ports(1)
        spec = MeshSpec(
            mode=f"mixed {worker}",
            model=MODEL,
            workers=(("mixed", worker),),
            overrides=(f"mixed.admin_port={port}", f"router.reroute_wait_s={_ANSWER_S}"),
            restart=restart,
        )
        mesh = await Mesh.start(spec, folder, SystemClock(), print, environ=traces.environ)
        try:
            async with Probe(mesh) as probe:
                yield _Running(mesh, probe, port)
        finally:
            clean = await mesh.stop()
        assert clean
        assert traces.left() == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[_Running]:
    """Four ranks of which two share a sequence."""
    async with _mixed(SHARED, restart=True) as running:
        yield running


async def test_prompts_that_come_while_others_decode_share_no_step_with_them(shared: _Running) -> None:
    """All finish with the reference's tokens; prompts in pieces and decodes take turns; nothing stays held."""
    first = _Stream(PROMPTS[257], NUM_INJECTED)
    await first.run(shared.probe)
    assert first.is_right
    baseline = await shared.probe.holdings()
    before = await shared.steps()
    assert [each.is_right for each in await shared.inject()] == [True] * 7
    steps = await shared.steps()
    assert steps.keys() == {"prefill", "chunk", "decode"}
    assert all(steps[mode] > before[mode] for mode in steps)
    await shared.probe.assert_settles(baseline)


async def test_a_rank_that_is_killed_costs_all_ranks_their_requests_alike(shared: _Running) -> None:
    """One of four dies in the middle of streams: what may not go on elsewhere ends by name, the rest once the worker is back.

    The worker that comes back is another incarnation, with all of its memory free.
    """
    probe = shared.probe
    (before,) = await probe.workers()
    streams = [_Stream(prompt, len(prompt.output_ids)) for prompt in DECODING]
    last = _Stream(PROMPTS[48], NUM_DECODED, redispatch=False)
    async with asyncio.timeout(_ANSWER_S), asyncio.TaskGroup() as group:
        for each in (*streams, last):
            group.create_task(each.run(probe))
        for each in (*streams, last):
            await each.until(1, _ANSWER_S)
        rank = Processes(shared.mesh.pid).rank("mixed-0", 2)
        assert rank is not None
        os.kill(rank, signal.SIGKILL)
    assert last.error is not None
    assert last.error["code"] == "worker_lost"
    assert [each.error for each in streams] == [None] * 4
    assert [each.is_right for each in streams] == [True] * 4
    assert await unrest_after(probe, 1, _ANSWER_S) == ""
    (after,) = await probe.workers()
    assert after.incarnation != before.incarnation
    again = _Stream(PROMPTS[257], NUM_INJECTED)
    await again.run(probe)
    assert again.is_right


@pytest.mark.long
async def test_on_ranks_that_share_nothing_the_same_prompts_share_steps() -> None:
    """The check can fail: with dcp=1 and the same setting prompts are computed beside decodes."""
    async with _mixed("tp=2") as running:
        assert [each.is_right for each in await running.inject()] == [True] * 7
        assert (await running.steps())["mixed"] > 0


@pytest.mark.long
async def test_eight_ranks_in_groups_of_four_behind_two(tmp_path: Path) -> None:
    """P2/D8 with dcp=4, pushed between processes: 32 prompts, 64 tokens each, eight at a time, all equal."""
    workers = (("prefill", "tp=2"), ("decode", "tp=8,dcp=4"))
    mesh = await Mesh.start(MeshSpec(mode="P2/D8 dcp4", model=MODEL, workers=workers), tmp_path, SystemClock(), print)
    try:
        async with Probe(mesh) as probe:
            streams = [_Stream(prompt, len(prompt.output_ids)) for prompt in PROMPTS.values()]
            await _all(probe, streams, 8)
            assert [len(each.prompt.token_ids) for each in streams if not each.is_right] == []
            assert (await probe.scan("decode", "decode-0")).num_prefilled_tokens == 0
    finally:
        clean = await mesh.stop()
    assert clean


@pytest.mark.long
async def test_twenty_rounds_of_long_answers_end_cleanly() -> None:
    """In each round a mesh of its own: five requests of 256 tokens at once, and a prompt in pieces that comes beside them.

    Every answer begins as the reference does, and is the same in every round; memory and descriptors are back after each, and
    the mesh ends with status 0 and leaves nothing.
    """
    clock = SystemClock()
    known: dict[int, list[int]] = {}
    for number in range(NUM_ROUNDS):
        began = clock.monotonic()
        async with _mixed(SHARED) as running:
            await _all(running.probe, [_Stream(prompt, NUM_INJECTED) for prompt in SOAKED], AT_ONCE)
            baseline = await running.probe.holdings()
            served = clock.monotonic()
            streams = [_Stream(prompt, NUM_SOAKED) for prompt in SOAKED]
            injected = _Stream(PROMPTS[600], NUM_INJECTED)
            async with asyncio.TaskGroup() as group:
                group.create_task(_all(running.probe, streams, AT_ONCE))
                await streams[0].until(1, _ANSWER_S)
                group.create_task(injected.run(running.probe))
            took = clock.monotonic() - served
            for each in (*streams, injected):
                assert each.is_right
                assert known.setdefault(len(each.prompt.token_ids), each.token_ids) == each.token_ids
            steps = await running.steps()
            assert "mixed" not in steps
            await running.probe.assert_settles(baseline)
        print(
            f"round {number}: {AT_ONCE * NUM_SOAKED / took:.0f} tokens/s, {steps}, {clock.monotonic() - began:.1f} s in all"
        )


async def _all(probe: Probe, streams: Sequence[_Stream], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def run(stream: _Stream) -> None:
        async with gate:
            await stream.run(probe)

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(run(stream))
