"""How a worker is told what moves its cache bytes, and what of it reaches its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from common.engine.transfer.transports import open_data_plane
from common.runtime.clock import SystemClock
from common.worker.core.compatibility import Rule, judge
from common.worker.settings import WorkerSettings
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.rank import StartRank
from contracts.workers import WorkerRole


def settings(**values: Any) -> WorkerSettings:
    """A worker's settings with these values."""
    return WorkerSettings(worker_id="w", model=Path("m"), **values)


def start(directory: Path, **values: Any) -> StartRank:
    """A rank's start with these values."""
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 8, "num_slots": 2}
    sizes |= {"max_step_tokens": 8, "max_step_sequences": 2, "transport_dir": str(directory)}
    return StartRank(worker_id="w", incarnation="i1", rank=0, tp=1, model_dir="m", **{**sizes, **values})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"transport_host": ""}, "transport_host"),
        ({"transport_host": "0.0.0.0"}, "transport_advertise_host"),
        ({"transport_host": "::"}, "transport_advertise_host"),
        ({"transport_advertise_host": "0.0.0.0"}, "transport_advertise_host"),
    ],
    ids=str,
)
def test_an_address_that_peers_cannot_come_to_is_refused(values: dict[str, Any], text: str) -> None:
    """With tcp an empty or a catch-all address is an error by name."""
    (refusal,) = judge(settings(transport=Transport.TCP, **values), WorkerRole.PREFILL, None).refusals
    assert refusal.key == text
    assert refusal.rule is Rule.TCP_ADDRESS


def test_an_address_that_nobody_would_look_at_is_refused() -> None:
    """Shared memory has no addresses: one that is given is an error by name, and says what it needs."""
    made = settings(transport_host="0.0.0.0", transport_advertise_host="node-1")
    rule = "only with transport=tcp; this worker has transport=shm"
    refusals = judge(made, WorkerRole.PREFILL, None).refusals
    assert [(refusal.key, refusal.value, refusal.text) for refusal in refusals] == [
        ("transport_host", "0.0.0.0", rule),
        ("transport_advertise_host", "node-1", rule),
    ]
    as_by_default = settings(transport_host="127.0.0.1", transport_advertise_host="")
    assert judge(as_by_default, WorkerRole.PREFILL, None).refusals == ()


def test_every_address_may_be_listened_at_when_peers_are_told_one() -> None:
    """Listening everywhere is fine with a name for peers."""
    made = settings(transport=Transport.TCP, transport_host="0.0.0.0", transport_advertise_host="node-1")
    assert judge(made, WorkerRole.DECODE, None).refusals == ()


def test_a_rank_opens_the_transport_that_it_is_told(tmp_path: Path) -> None:
    """Shared memory by default; tcp at the address that it is told, advertising what it is told."""
    clock = SystemClock()
    shm = open_data_plane(start(tmp_path), clock)
    assert isinstance(shm, ShmDataPlane)
    shm.close()
    tcp = open_data_plane(
        start(tmp_path, transport="tcp", transport_host="127.0.0.1", transport_advertise_host="node-1"), clock
    )
    assert isinstance(tcp, TcpDataPlane)
    assert tcp.allocate(4096, 1).descriptor.opaque == f"node-1:{tcp.server.port}"
    tcp.close()


@pytest.mark.parametrize(
    ("values", "text"), [({"transport": "pigeon"}, "shm, tcp"), ({"transport_dir": ""}, "transport_dir")], ids=str
)
def test_a_rank_refuses_what_it_cannot_open(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    """An unknown transport names those that there are; shared memory needs its folder."""
    with pytest.raises(InvalidValueError, match=text):
        open_data_plane(start(tmp_path, **values), SystemClock())
