"""Real processes whose decode worker pulls: the reference's tokens over HTTP, `pdmesh set` between them, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
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


class Asker:
    """Asks for prompts of the reference, so many at once; each answer has to be the reference's."""

    def __init__(self, probe: Probe, at_once: int) -> None:
        self._probe = probe
        self._at_once = at_once
        self._gate = asyncio.Semaphore(at_once)

    async def ask(self, prompt: StoredPrompt) -> str:
        """Ask for one, when it is its turn. Returns the id of the request."""
        async with self._gate:
            choice = await self._probe.complete(list(prompt.token_ids), NUM_TOKENS, ignore_eos=True)
        assert tuple(choice["token_ids"]) == prompt.output_ids[:NUM_TOKENS]
        return str(choice["id"]).removeprefix("cmpl-")

    async def keep_asking(self, enough: asyncio.Event) -> list[str]:
        """Ask for each once, and for the longest again until it is `enough`: some request is under way at any time."""
        prompts = chain(PROMPTS, iter(lambda: None if enough.is_set() else PROMPTS[-1], None))

        async def some() -> list[str]:
            return [await self.ask(prompt) for prompt in prompts]

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(some()) for _ in range(self._at_once)]
        return [request for task in asked for request in task.result()]


async def command(*words: str) -> tuple[int, str]:
    """Run a command to its end: its status, and what it printed."""
    process = await asyncio.create_subprocess_exec(*Commands().pdmesh(*words), stdout=PIPE, stderr=STDOUT)
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize(("transport", "pull"), [pytest.param("shm", "states", marks=pytest.mark.long), ("tcp", "all")])
async def test_a_mesh_that_pulls_gives_the_reference_tokens(tmp_path: Path, transport: str, pull: str) -> None:
    """P2/D1: `pdmesh set` changes how shards are read while requests run: no token changes, and each request's events say how it went."""
    workers = (("prefill", "tp=2"), ("decode", f"tp=1,transfer=pull,pull={pull}"))
    spec = MeshSpec(mode="P2/D1 pull", model=MODEL, workers=workers, overrides=(f"transport={transport}",))
    mesh = await Mesh.start(spec, tmp_path, SystemClock(), print)
    try:
        async with Probe(mesh) as probe:
            asker = Asker(probe, AT_ONCE[transport])
            await asker.ask(PROMPTS[0])
            baseline = await probe.holdings()
            enough = asyncio.Event()
            set_to: dict[str, bool] = {}
            async with asyncio.TaskGroup() as group:
                running = group.create_task(asker.keep_asking(enough), name="requests")
                for value in (0, 1, 0):
                    words = ("set", "decode-0", f"parallel_shard_pull={value}", "--nats", mesh.nats_url)
                    answer = await command(*words)
                    assert answer == (0, f"decode-0: parallel_shard_pull was {1 - value}, is {value}\n")
                    set_to[await asker.ask(PROMPTS[-1])] = bool(value)
                enough.set()
            status, text = await command("set", "decode-7", "parallel_shard_pull=0", "--nats", mesh.nats_url)
            assert status == 1
            assert "no worker decode-7 is registered" in text
            await probe.assert_settles(baseline)
            assert len(running.result()) >= len(PROMPTS)
            for request in (*running.result(), *set_to):
                unlocked = await probe.event(_is("request_unlocked", request))
                shards = [each for each in probe.of_request(request) if each["event"] == "shard_pulled"]
                assert sorted((each["source_rank"], each["shard_state"]) for each in shards) == [
                    (0, "done"),
                    (1, "done"),
                ]
                assert {each["parallel"] for each in shards} == {unlocked["parallel"]}
                assert unlocked["parallel"] is set_to.get(request, unlocked["parallel"])
            assert set(set_to.values()) == {True, False}
            assert (await probe.scan("decode", "decode-0")).num_prefilled_tokens == 0
    finally:
        assert await mesh.stop()


def _is(name: str, request: str) -> Callable[[Event], bool]:
    return lambda event: bool(event["request_id"] == request and event["event"] == name)
