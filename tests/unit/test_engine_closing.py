"""How a rank ends: within the time that its worker has, though a peer takes nothing of what is being written to it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork
from common.engine.ranks.group import RankGroupTimeouts
from common.engine.ranks.rank import Rank
from common.engine.transfer import push_lane
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_lane import PushTask
from common.engine.transfer.pusher import Pusher
from common.runtime.clock import SystemClock
from common.runtime.lifecycle import CLOSE_TIMEOUT_S
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role

PATIENCE_S = 60.0


def test_ranks_that_have_to_be_killed_are_gone_before_their_worker_gives_up() -> None:
    """They are waited for twice: to end by themselves, and once more when they have been killed."""
    assert 2 * RankGroupTimeouts().stop_s < CLOSE_TIMEOUT_S


def test_a_rank_closes_its_peers_before_it_waits_for_what_is_written_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that its peer does not take is ended by that: the rank waits for no thread that nothing would end."""
    begun, ended = threading.Event(), threading.Event()

    def write(*_args: object) -> None:
        begun.set()
        assert ended.wait(PATIENCE_S)
        raise OSError("the peer has been closed")

    clock = SystemClock()
    plane = FakeDataPlane(FakeNetwork(), peer_id="p", incarnation="i", now=clock.monotonic)
    points = parse_failpoints("")
    pusher = Pusher(
        rank=0,
        region=plane.allocate(64, 1),
        clock=clock,
        emit=lambda _report: None,
        faults=PushFaults(points, plane),
        shaper=LinkShaper(points),
    )
    monkeypatch.setattr(push_lane, "write_parts", write)
    part: Any = SimpleNamespace(part=SimpleNamespace(dst_rank=0))
    peer = Peer(parts={(Namespace.TARGET, Role.SSM, 0): (part,)}, templates=(), regions={}, num_blocks=1, num_slots=1)
    task = PushTask(
        seq=1,
        handoff_id="h",
        peer=peer,
        grant=Grant(worker_id="d", incarnation="j", generation=1, block_ids=(0,), slot=0),
        namespace=Namespace.TARGET,
        role=Role.SSM,
        layer=0,
        chunk=None,
        slot=0,
        queued_ns=0,
    )
    pusher.submit([task])
    assert begun.wait(PATIENCE_S)
    order: list[str] = []
    wait_for_pushes = pusher.close

    def close() -> None:
        order.append("pushes are waited for")
        wait_for_pushes()

    def close_peers() -> None:
        order.append("peers are closed")
        ended.set()

    monkeypatch.setattr(pusher, "close", close)
    rank: Any = object.__new__(Rank)
    rank._pusher = pusher
    rank._peers = SimpleNamespace(close=close_peers)
    rank._puller = SimpleNamespace(close=lambda: order.append("pulls are waited for"))
    rank._ports = SimpleNamespace(collectives=None, data_plane=plane)
    rank._region = SimpleNamespace(close=lambda: None)
    rank._refusals = SimpleNamespace(close=lambda: None)
    rank.close()
    assert pusher.num_queued == 0
    assert order == ["peers are closed", "pushes are waited for", "pulls are waited for"]
