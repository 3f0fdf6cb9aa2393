"""Real processes whose decode worker pulls: the reference's tokens over HTTP, `pdmesh set` between them, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.launcher_traces import Commands
from tests.e2e.mesh_probe import Event, Probe
from tests.e2e.proc import DEADLINE_S
from tests.integration.stored_reference import StoredPrompt, load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
AT_ONCE = {"shm": 4, "tcp": 1}
"""Requests at once. Over tcp transfers side by side leave more connections open, as many as there ever were at once."""
NUM_TOKENS = 24
PROMPTS = load_reference("tiny").prompts[::4]
HALF = len(PROMPTS) // 2


async def all_equal(probe: Probe, prompts: Sequence[StoredPrompt], at_once: int) -> list[str]:
    """Ask for all of these, some at a time; each answer is the reference's. Returns the ids of the requests."""
    gate = asyncio.Semaphore(at_once)

    async def ask(prompt: StoredPrompt) -> str:
        async with gate:
            choice = await probe.complete(list(prompt.token_ids), NUM_TOKENS, ignore_eos=True)
        assert tuple(choice["token_ids"]) == prompt.output_ids[:NUM_TOKENS]
        return str(choice["id"]).removeprefix("cmpl-")

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(prompt)) for prompt in prompts]
    return [task.result() for task in asked]


async def command(*words: str) -> tuple[int, str]:
    """Run a command to its end: its status, and what it printed."""
    process = await asyncio.create_subprocess_exec(*Commands().pdmesh(*words), stdout=PIPE, stderr=STDOUT)
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize(("transport", "pull"), [pytest.param("shm", "states", marks=pytest.mark.long), ("tcp", "all")])
async def test_a_mesh_that_pulls_gives_the_reference_tokens(tmp_path: Path, transport: str, pull: str) -> None:
    """P2/D1: half of the requests read their shards side by side, half one by one; events and the record of one say so."""
    workers = (("prefill", "tp=2"), ("decode", f"tp=1,transfer=pull,pull={pull}"))
    spec = MeshSpec(mode="P2/D1 pull", model=MODEL, workers=workers, overrides=(f"transport={transport}",))
    mesh = await Mesh.start(spec, tmp_path, SystemClock(), print)
    try:
        async with Probe(mesh) as probe:
            await all_equal(probe, PROMPTS[:1], AT_ONCE[transport])
            baseline = await probe.holdings()
            before = await all_equal(probe, PROMPTS[:HALF], AT_ONCE[transport])
            words = ("set", "decode-0", "parallel_shard_pull=0", "--nats", mesh.nats_url)
            assert await command(*words) == (0, "decode-0: parallel_shard_pull was 1, is 0\n")
            after = await all_equal(probe, PROMPTS[HALF:], AT_ONCE[transport])
            status, text = await command("set", "decode-7", "parallel_shard_pull=0", "--nats", mesh.nats_url)
            assert status == 1
            assert "no worker decode-7 is registered" in text
            await probe.assert_settles(baseline)
            for requests, parallel in ((before, True), (after, False)):
                for request in requests:
                    unlocked = await probe.event(_is("request_unlocked", request))
                    assert unlocked["parallel"] is parallel
                    shards = [each for each in probe.of_request(request) if each["event"] == "shard_pulled"]
                    assert [(each["source_rank"], each["shard_state"]) for each in sorted(shards, key=_source)] == [
                        (0, "done"),
                        (1, "done"),
                    ]
            assert (await probe.scan("decode", "decode-0")).num_prefilled_tokens == 0
    finally:
        assert await mesh.stop()


def _is(name: str, request: str) -> Callable[[Event], bool]:
    return lambda event: bool(event["request_id"] == request and event["event"] == name)


def _source(event: Event) -> int:
    return int(event["source_rank"])
