"""Decode workers that join a running mesh, die, come back and do not fit, as processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.runtime.clock import SystemClock

if TYPE_CHECKING:
    from tests.e2e.launcher_traces import Commands
    from tests.e2e.mesh_probe import Probe

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
_MAX_REQUESTS = 8
_EXIT_S = 60.0


@contextmanager
def _decode_worker(pair: Probe, worker_id: str, spec: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """One more decode worker on the mesh's bus; killed in the end, if it still runs."""
    words = [f"worker_id={worker_id}", f"model={MODEL}", f"nats_url={pair.mesh.nats_url}", "num_blocks=256", spec]
    command = [sys.executable, "-P", "-m", "services.decode", ",".join(filter(None, words))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _sign_off(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(_EXIT_S) == 0


async def _served_by(pair: Probe, worker_id: str) -> None:
    """Ask until the worker has taken a request over; idle workers take turns."""
    for _ in range(_MAX_REQUESTS):
        await pair.complete([5, 6, 7, 8], 3)
        if any(event.get("decode_worker") == worker_id for event in pair.events):
            return
    raise AssertionError(f"{worker_id} was given none of {_MAX_REQUESTS} requests")


def _shown(pair: Probe, commands: Commands) -> list[str]:
    """The lines of `pdmesh links`."""
    command = commands.pdmesh("links", "--nats", pair.mesh.nats_url)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_EXIT_S).stdout.splitlines()


async def test_workers_come_die_and_do_not_fit(pair: Probe, commands: Commands) -> None:
    """A new decode worker is linked; killed and restarted, it is unlinked, linked again and served.

    One with another model is refused by name, and `pdmesh links` says so.
    """
    with _decode_worker(pair, "decode-7", "engine=fake") as other, _decode_worker(pair, "decode-8") as first:
        refused = await pair.link_event("link_refused", "decode-7")
        assert ", fake at the decode worker (rule same_model: " in refused["reason"]
        linked = await pair.link_event("linked", "decode-8")
        first.kill()
        first.wait(_EXIT_S)
        with _decode_worker(pair, "decode-8") as second:
            gone = await pair.link_event("unlinked", "decode-8")
            assert gone["decode"] == linked["decode"]
            again = await pair.link_event("linked", "decode-8", pair.link_events.index(gone))
            assert again["decode"]["incarnation"] != linked["decode"]["incarnation"]
            await _served_by(pair, "decode-8")
            shown = await asyncio.to_thread(_shown, pair, commands)
            states = {tuple(line.split()[:2]): line.split()[2] for line in shown[1:] if not line.startswith("    ")}
            assert states == {
                ("prefill-0", "decode-0"): "linked",
                ("prefill-0", "decode-7"): "refused",
                ("prefill-0", "decode-8"): "linked",
            }
            assert f"    {refused['reason']}" in shown
            await asyncio.to_thread(_sign_off, second)
        await pair.link_event("unlinked", "decode-8", pair.link_events.index(again))
        await asyncio.to_thread(_sign_off, other)
    async with asyncio.timeout(_EXIT_S):
        while {worker.worker_id for worker in await pair.workers()} != {"prefill-0", "decode-0"}:
            await SystemClock().sleep(0.1)
