"""What a decode worker shows of its links with those that it pulls from: tries by how they ended, and how it stands with each source."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.engine.port import EngineError
from contracts.errors import ErrorCode
from services.decode import sources
from services.prefill.service import PrefillService
from tests.integration.pulling_pair import engine_of, pulling_pair
from tests.integration.worker_world import Mesh, in_mesh


def shown(mesh: Mesh, name: str) -> dict[str, float]:
    """The series of one of the decode worker's metrics that are not zero, by their only label."""
    families = text_string_to_metric_families(mesh.services["decode-0"].metrics.exposition().decode())
    samples = (sample for family in families for sample in family.samples if sample.name == f"pdmesh_{name}")
    return {value: sample.value for sample in samples for value in sample.labels.values() if sample.value}


def test_sources_that_are_refused_or_not_reached_are_counted() -> None:
    """One that does not fit is tried once; one that cannot be reached again and again, until it can; one that leaves is no source."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        assert (shown(mesh, "worker_source_links_total"), shown(mesh, "worker_sources")) == ({"ok": 1}, {"linked": 1})
        engine = engine_of(mesh)
        link_source, is_cut = engine.link_source, [True]

        async def link(peer: Any, ranks: Any) -> None:
            if peer.worker_id == "prefill-1":
                raise EngineError("block_size: planted", code=ErrorCode.INCOMPATIBLE_WORKERS)
            if is_cut[0]:
                raise EngineError("rank 0: no answer", code=ErrorCode.TRANSFER_FAILED)
            await link_source(peer, ranks)

        engine.link_source = link  # type: ignore[method-assign]  # as over a network that drops packets
        await mesh.add(PrefillService, "prefill-1", tp=2)
        await mesh.add(PrefillService, "prefill-2", tp=2)
        await mesh.clock.sleep(7.0)
        tries = shown(mesh, "worker_source_links_total")
        assert (tries["ok"], tries["incompatible_workers"]) == (1, 1)
        assert tries["transfer_failed"] == 4
        assert shown(mesh, "worker_sources") == {"linked": 1, "refused": 1, "failed": 1}
        is_cut[0] = False
        await mesh.clock.sleep(2.5)
        assert shown(mesh, "worker_source_links_total") == tries | {"ok": 2}
        assert shown(mesh, "worker_sources") == {"linked": 2, "refused": 1}

    in_mesh(scenario)


def test_a_source_too_many_is_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and again whenever its record comes."""
    monkeypatch.setattr(sources, "MAX_SOURCES", 1)

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        await mesh.add(PrefillService, "prefill-1", tp=2)
        await mesh.clock.sleep(5.0)
        assert shown(mesh, "worker_source_links_total") == {"ok": 1, "overloaded": 3}
        assert shown(mesh, "worker_sources") == {"linked": 1}

    in_mesh(scenario)
