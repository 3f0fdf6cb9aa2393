"""A mesh on three NATS servers loses the one that leads a stream, then the one that leads them all: nobody else is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import structlog

from common.bus.errors import BusTimeout, BusUnavailable, RevisionConflict
from common.bus.nats import NatsBus
from common.bus.storage import LEASES_CONFIG, WORKERS_CONFIG
from common.runtime.clock import Deadline, SystemClock
from contracts.subjects import EVENTS_STREAM, HANDOFFS_BUCKET, LEASES_BUCKET, WORKERS_BUCKET
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.chaos.cases import greedy_cases
from tests.e2e.chaos.nats_cluster import NatsCluster, nats_cluster
from tests.e2e.chaos.report import judge
from tests.e2e.chaos.rest import unrest_after
from tests.e2e.chaos.streams import Ending, Load
from tests.e2e.mesh_probe import Probe

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny"
_SERVED_S = 60.0


async def _served(load: Load, wanted: int) -> None:
    """Wait for so many whole streams that began from now on."""
    clock = SystemClock()
    since, deadline = clock.monotonic(), Deadline.after(clock, _SERVED_S)
    while sum(o.ending is Ending.WHOLE and o.started_at >= since for o in load.outcomes) < wanted:
        assert not deadline.passed, Counter(f"{o.ending} {o.code}" for o in load.outcomes)
        await clock.sleep(0.1)


async def _lose(cluster: NatsCluster, name: str, load: Load) -> None:
    """Kill a server, be served without it, and let it come back."""
    await cluster.kill(name)
    await _served(load, 4)
    await cluster.start(name)
    await _served(load, 4)


@pytest.mark.long
async def test_a_mesh_outlives_the_leaders_among_its_servers(tmp_path: Path) -> None:
    """Each stream is whole or ends with an error that names itself, no worker dies of it, and everything is given back."""
    async with nats_cluster(tmp_path) as cluster:
        spec = MeshSpec(
            mode="on three servers",
            model=MODEL,
            workers=(("prefill", "tp=2"), ("decode", "tp=1")),
            overrides=(f"launcher.nats_url={cluster.url}", "nats_replicas=3", "router.request_timeout_s=25"),
        )
        logs = tmp_path / "logs"
        logs.mkdir()
        mesh = await Mesh.start(spec, logs, SystemClock(), print)
        try:
            mesh.nats_url = cluster.url.partition(",")[0]  # a client learns of the others from the first
            async with Probe(mesh) as probe:
                load = Load(mesh.url, await probe.model(), greedy_cases(), num_streams=4, seed=1)
                async with asyncio.TaskGroup() as group:
                    group.create_task(load.run(), name="load")
                    await _served(load, 4)
                    for stream in (f"KV_{HANDOFFS_BUCKET}", f"KV_{WORKERS_BUCKET}", EVENTS_STREAM):
                        assert (await cluster.kept(stream))[0] == 3
                    await _lose(cluster, await cluster.stream_leader(f"KV_{HANDOFFS_BUCKET}"), load)
                    await _lose(cluster, await cluster.meta_leader(), load)
                    load.stop()
                print(Counter(f"{o.ending} {o.code}" for o in load.outcomes))
                assert judge(load.outcomes, (), strict=False) == []
                assert await unrest_after(probe, 2, _SERVED_S) == ""
        finally:
            assert await mesh.stop()  # nothing has been restarted: a death would have ended the mesh


@pytest.mark.long
async def test_what_three_servers_keep_outlives_one_of_them(tmp_path: Path) -> None:
    """A value survives its leader, writing goes on after the election, and leases there last longer than an election."""
    async with nats_cluster(tmp_path) as cluster, asyncio.TaskGroup() as group:
        clock = SystemClock()
        bus = await NatsBus.connect(
            cluster.url, name="t", tasks=group, clock=clock, log=structlog.get_logger(), replicas=3
        )
        looking = await NatsBus.connect(
            cluster.url, name="l", tasks=group, clock=clock, log=structlog.get_logger(), replicas=None
        )
        try:
            bucket = await bus.ensure_bucket(LEASES_CONFIG)
            await bus.ensure_bucket(WORKERS_CONFIG)
            await looking.ensure_bucket(WORKERS_CONFIG)  # whoever only looks changes nothing
            assert await cluster.kept(f"KV_{WORKERS_BUCKET}") == (3, 10.0)
            assert await cluster.kept(f"KV_{LEASES_BUCKET}") == (3, 15.0)
            revision = await bucket.create("key", b"1")
            await cluster.kill(await cluster.stream_leader(f"KV_{LEASES_BUCKET}"))
            deadline = Deadline.after(clock, 12.0)
            while True:
                try:
                    await bucket.update("key", b"2", last=revision)
                    break
                except (BusUnavailable, BusTimeout):
                    assert not deadline.passed
                    await clock.sleep(0.1)
                except RevisionConflict:  # an earlier try got through unheard
                    break
            entry = await bucket.get("key")
            assert entry is not None
            assert entry.value == b"2"
        finally:
            await looking.close()
            await bus.close()
