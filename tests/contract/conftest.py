"""Real NATS servers for the contract suites, and the bus adapters on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus.server import NatsServer
from tests.contract.bus_world import MemoryWorld, NatsWorld, World


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for all tests that do not stop it."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may stop and start."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture(params=["memory", "nats"])
def world(request: pytest.FixtureRequest) -> World:
    """Each adapter in turn, on a server that other tests use too."""
    return MemoryWorld() if request.param == "memory" else NatsWorld(request.getfixturevalue("nats_server"))


@pytest.fixture(params=["memory", "nats"])
def breakable(request: pytest.FixtureRequest) -> World:
    """Each adapter in turn, on a server that only this test has."""
    return MemoryWorld() if request.param == "memory" else NatsWorld(request.getfixturevalue("own_nats_server"))
