"""Real NATS servers for the contract suites."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus.server import NatsServer


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
