"""One bench for each adapter: every test that asks for it holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.dataplane.bench import ADAPTERS, Bench, make_bench


@pytest.fixture(params=ADAPTERS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Two endpoints of the adapter under test."""
    made = make_bench(request.param, tmp_path, monkeypatch)
    yield made
    made.close()
