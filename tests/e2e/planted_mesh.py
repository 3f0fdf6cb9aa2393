"""A mesh of single services whose workers obey the orders of `planted/sitecustomize.py`, and what a test looks at in it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from common.runtime.clock import Deadline, SystemClock
from common.runtime.settings import environment
from contracts.codec import decode, encode
from contracts.handoff import Grant, HandoffRecord
from contracts.manifest import RankManifest
from contracts.subjects import HANDOFFS_BUCKET, WorkerVerb, worker_rpc
from contracts.workers import DescribeWorker, WorkerDescription, WorkerScan
from tests.e2e.mesh_probe import Event, Probe
from tests.e2e.proc import DEADLINE_S, region_bytes, state_of
from tests.e2e.service_processes import Services, running_services
from tests.e2e.stream import Stream
from tests.integration.cache_bytes import Gathered, Held, gather

_PLANTED: Final = Path(__file__).parent / "planted"
_POLL_S: Final = 0.02
_CLOCK: Final = SystemClock()


class PlantedMesh:
    """Prefill on two replicas of two ranks, decode on one rank."""

    def __init__(self, services: Services, probe: Probe, folder: Path) -> None:
        self.services = services
        self.probe = probe
        self.folder = folder

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        """One streamed completion to its end."""
        stream = Stream()
        await stream.read(self.probe, prompt, max_tokens)
        return stream

    # Orders.

    def order(self, name: str) -> None:
        """Give an order."""
        (self.folder / name).touch()

    def withdraw(self, name: str) -> None:
        """Take an order back, obeyed or not."""
        (self.folder / name).unlink(missing_ok=True)

    async def frozen(self) -> int:
        """Wait until a rank has obeyed and stands still; its process id."""
        claimed = self.folder / "frozen"
        await self.until(claimed.exists)
        pid = int(claimed.read_text(encoding="ascii"))
        claimed.unlink()
        await self.until(lambda: state_of(pid) == "T")
        assert pid in self.services.pids_of("prefill")
        return pid

    def wake(self, pid: int) -> None:
        """Let a frozen rank go on."""
        os.kill(pid, signal.SIGCONT)

    # Sights.

    async def until(self, condition: Any) -> None:
        """Wait for something that can be seen only by looking."""
        deadline = Deadline.after(_CLOCK, DEADLINE_S)
        while not condition():
            assert not deadline.passed
            await _CLOCK.sleep(_POLL_S)

    async def blocks(self) -> dict[str, int]:
        """Decode's blocks by who has them: free, kept, held, quarantined."""
        url = f"http://127.0.0.1:{self.services.admin_ports['decode']}/metrics"
        async with self.probe.http.get(url) as response:
            text = await response.text()
        found = re.findall(r'^pdmesh_worker_blocks\{dp_rank="0",state="(\w+)"\} ([\d.]+)$', text, re.MULTILINE)
        return {state: int(float(value)) for state, value in found}

    async def replays(self) -> dict[str, int]:
        """How often the router has asked for tokens again, by what came of it."""
        async with self.probe.http.get(f"{self.services.url}/metrics") as response:
            text = await response.text()
        found = re.findall(r'^pdmesh_router_replays_total\{outcome="(\w+)"\} ([\d.]+)$', text, re.MULTILINE)
        return {outcome: int(float(value)) for outcome, value in found}

    async def blocks_become(self, **wanted: int) -> None:
        """Wait until so many blocks are in each of some states."""
        deadline = Deadline.after(_CLOCK, DEADLINE_S)
        while not wanted.items() <= (now := await self.blocks()).items():
            assert not deadline.passed, (wanted, now)
            await _CLOCK.sleep(_POLL_S)

    async def prefill_answers(self) -> WorkerScan:
        """What prefill holds, once its engines answer and no handoff lives there."""
        deadline = Deadline.after(_CLOCK, DEADLINE_S)
        while (scan := await self.probe.scan("prefill", "prefill-0")).handoff_ids:
            assert not deadline.passed, scan
            await _CLOCK.sleep(_POLL_S)
        return scan

    async def decode_manifest(self) -> RankManifest:
        """The layout of decode's rank."""
        subject = worker_rpc("decode", "decode-0", WorkerVerb.DESCRIBE)
        reply = await self.probe.nats.request(subject, encode(DescribeWorker(rank=0)), timeout=DEADLINE_S)
        return decode(reply.data, WorkerDescription).manifest

    async def submitted(self, num_prompt_tokens: int, after: int) -> str:
        """The id of the first request with so long a prompt, behind the first `after` events."""

        def is_it(event: Event) -> bool:
            return bool(
                event["event"] == "request_submitted"
                and event["num_tokens"] == num_prompt_tokens
                and event in self.probe.events[after:]
            )

        return str((await self.probe.event(is_it))["request_id"])

    async def grant(self, request_id: str) -> Grant:
        """The memory of a request that has ended well, from its record."""
        end = await self.probe.event(
            lambda each: each["request_id"] == request_id and each["event"] == "request_finished"
        )
        subject = f"$JS.API.DIRECT.GET.KV_{HANDOFFS_BUCKET}.$KV.{HANDOFFS_BUCKET}.{end['handoff_id']}"
        record = decode((await self.probe.nats.request(subject, b"", timeout=DEADLINE_S)).data, HandoffRecord)
        assert record.grant is not None
        return record.grant

    async def cache(self, grant: Grant, num_tokens: int) -> Gathered:
        """The bytes in the memory of a grant: they stay there after its end, until others come."""
        manifest = await self.decode_manifest()
        (pid,) = [pid for pid in self.services.pids_of("decode") if _maps_region(pid)]
        held = Held(block_ids=grant.block_ids, slot=grant.slot, num_tokens=num_tokens)
        return gather([manifest], [memoryview(region_bytes(pid))], held)


def _maps_region(pid: int) -> bool:
    return "memfd:pdmesh-region" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


@asynccontextmanager
async def planted_mesh(directory: Path, transport: str) -> AsyncIterator[PlantedMesh]:
    """Start it, ready."""
    folder = directory / "orders"
    folder.mkdir()
    worker: dict[str, Any] = {"transport": transport, "collective_timeout_ms": 120_000}
    settings: dict[str, dict[str, Any]] = {
        "router": {"request_timeout_s": 50.0},
        "prefill": worker | {"tp": 2, "dp": 2, "num_blocks": 512},
        "decode": worker | {"num_blocks": 192},
    }
    path = os.pathsep.join(filter(None, (str(_PLANTED), environment().get("PYTHONPATH"))))
    environ = {"PYTHONPATH": path, "PLANTED_FOLDER": str(folder)}
    async with running_services(directory, settings, environ) as services, Probe(services) as probe:
        await services.ready(probe.http)
        yield PlantedMesh(services, probe, folder)
