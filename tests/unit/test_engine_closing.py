"""How a rank ends: within the time that its worker has, though a peer takes nothing of what is being written to it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.ranks.group import RankGroupTimeouts
from common.engine.ranks.rank import Rank
from common.engine.transfer import push_lane
from common.runtime.lifecycle import CLOSE_TIMEOUT_S
from tests.unit.push_world import linked, make_pusher, task_of

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

    pusher = make_pusher(lambda _report: None)
    monkeypatch.setattr(push_lane, "write_parts", write)
    pusher.submit([task_of(1, linked())])
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
    rank._ports = SimpleNamespace(collectives=None, data_plane=SimpleNamespace(close=lambda: None))
    rank._region = SimpleNamespace(close=lambda: None)
    rank._refusals = SimpleNamespace(close=lambda: None)
    rank.close()
    assert pusher.num_queued == 0
    assert order == ["peers are closed", "pushes are waited for", "pulls are waited for"]
