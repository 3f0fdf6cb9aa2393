"""The table of every metric, made from the registries of real services. `python -m tests.integration.metrics_table` writes it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import structlog

from common.bus.measurement import BusMetrics
from common.bus.memory import MemoryServer
from common.runtime.metrics import MetricRow, Metrics
from services.broker.app import make_leadership
from services.broker.settings import BrokerSettings
from services.mixed.service import MixedService
from tests.integration.broker_world import World, in_world
from tests.integration.router_world import router_world
from tests.integration.worker_world import Mesh, in_mesh, pair

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_HEAD: Final = """\
# Metrics

What `/metrics` of each service shows, in Prometheus' text format: the router on its own port, the others on their admin
port. All services also show `process_*` (CPU, memory, descriptors) of prometheus-client.

- Durations are histograms in seconds whose buckets resolve 0.1 ms to 10 minutes where they are part of a request.
- `phase` is one of those in `contracts/phases.py`, which says what each means; `source_rank` is empty for all but `push`.
- `code` is one of `contracts/errors.py`. `endpoint` is completions, chat, models, tokenize, detokenize or other.
- `verb="replay"` of `pdmesh_rpc_handled_seconds` counts two things: tokens asked for again, and the word with which a router
  lets workers forget an answer that it has in full, one or two for each request on a healthy mesh. How often tokens were
  asked for again is `pdmesh_router_replays_total`.
- Each process counts for itself: sum over workers.
- Per request, the same figures stand in the events (`pdmesh timeline ID`), in the broker's line `handoff_finished` and in the
  router's line `request_finished`; events, lines and every message of a request carry its trace id (W3C Trace Context).

Written by `python -m tests.integration.metrics_table`; a test compares it with what the services register.

| metric | type | labels | services | meaning |
| --- | --- | --- | --- | --- |
"""


def registries() -> dict[str, Metrics]:
    """Each service's registry, after the service has started."""
    found: dict[str, Metrics] = {}

    async def router() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with router_world(Path(folder)) as world:
                found["router"] = world.metrics

    async def broker(world: World, server: MemoryServer) -> None:
        make_leadership(
            BrokerSettings(), bus=server.connect(), clock=world.clock, log=structlog.get_logger(), metrics=world.metrics
        )
        found["broker"] = world.metrics

    async def workers(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.add(MixedService, "mixed-0")
        found.update({service.role: service.metrics for service in mesh.services.values()})

    asyncio.run(router())
    in_world(broker)
    in_mesh(workers)
    for metrics in found.values():
        BusMetrics(metrics)  # the composition roots give it to the NATS adapter; here the bus is in memory
    return found


def services_of(registries: dict[str, Metrics]) -> dict[MetricRow, tuple[str, ...]]:
    """Which services show which metric, by name."""
    found: dict[MetricRow, tuple[str, ...]] = {}
    for service, metrics in registries.items():
        for row in metrics.described:
            found[row] = (*found.get(row, ()), service)
    return dict(sorted(found.items()))


def table(all_registries: dict[str, Metrics]) -> str:
    """The whole file."""
    lines = []
    for row, services in services_of(all_registries).items():
        labels = ", ".join(f"`{label}`" for label in row.labels)
        where = "all" if len(services) == len(all_registries) else ", ".join(services)
        meaning = row.text.rstrip(".")
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {where} | {meaning}. |\n")
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    FILE.write_text(table(registries()), encoding="utf-8")
