"""Meshes that the end-to-end tests share: they are expensive, so each is started once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.launcher_traces import Commands, Traces, short_folder
from tests.e2e.mesh_probe import Probe
from tests.e2e.planted_mesh import PlantedMesh, planted_mesh

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"

PAIR = MeshSpec(mode="P2/D1", model=MODEL, workers=(("prefill", "tp=2"), ("decode", "tp=1")))
SLOW_LAYER = 3
SLOW_MS = 400


async def _running(spec: MeshSpec, directory: Path) -> AsyncIterator[Probe]:
    mesh = await Mesh.start(spec, directory, SystemClock(), print)
    try:
        async with Probe(mesh) as probe:
            yield probe
    finally:
        assert await mesh.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probe]:
    """Prefill on two ranks, decode on one, with the shipped checkpoint."""
    async for probe in _running(PAIR, tmp_path_factory.mktemp("pair")):
        yield probe


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guessing_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probe]:
    """The pair as its preset has it: decode guesses three tokens with the draft head. One file's, like `wide_pair`."""
    spec = MeshSpec(mode="p2d1-mtp3", model=MODEL, workers=(), preset="p2d1-mtp3")
    async for probe in _running(spec, tmp_path_factory.mktemp("guessing")):
        yield probe


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def slow_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probe]:
    """The same, but the values of one layer leave rank 0 late: between prefill's end and the closed ledger lies time."""
    failpoint = f"prefill.failpoints=delay:role=value,layer={SLOW_LAYER},source=0,ms={SLOW_MS}"
    spec = MeshSpec(mode="P2/D1 slow", model=MODEL, workers=PAIR.workers, overrides=(failpoint,))
    async for probe in _running(spec, tmp_path_factory.mktemp("slow")):
        yield probe


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probe]:
    """Prefill on four ranks, decode in two replicas of two ranks each. One file's: a mesh that only stands by costs the others time."""
    spec = MeshSpec(mode="P4/D2x2", model=MODEL, workers=(("prefill", "tp=4"), ("decode", "tp=2,dp=2")))
    async for probe in _running(spec, tmp_path_factory.mktemp("wide")):
        yield probe


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def planted_shm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PlantedMesh]:
    """Single services over shared memory, whose workers can be told to fail."""
    async with planted_mesh(tmp_path_factory.mktemp("planted-shm"), "shm") as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def planted_tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PlantedMesh]:
    """The same over tcp, for one file."""
    async with planted_mesh(tmp_path_factory.mktemp("planted-tcp"), "tcp") as mesh:
        yield mesh


@pytest.fixture
def traces() -> Iterator[Traces]:
    """What the test's own mesh leaves behind."""
    with short_folder() as folder:
        yield Traces.watch(folder / "tmp")


@pytest.fixture(scope="session")
def commands() -> Commands:
    """How `pdmesh` is called."""
    return Commands()
