"""The reports of pushes in the worker's process: a rank that says much at once is heard, and does not crowd out who listens."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from common.engine.port import EngineDeadError
from common.engine.ranks import channels
from common.engine.ranks.channels import MAX_READ, RankChannels
from common.engine.ranks.datagrams import split
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome
from contracts.rank_codec import encode

PATIENCE_S = 30.0
NUM_REPORTS = 8 * MAX_READ


def report(number: int) -> PartPushed:
    """Of a queue that was full, one of many."""
    return PartPushed(
        rank=0,
        seq=number,
        handoff_id="h",
        namespace=Namespace.TARGET,
        role=Role.KEY,
        layer=0,
        destination_rank=0,
        start=0,
        end=1,
        num_bytes=0,
        queued_ns=1,
        started_ns=1,
        done_ns=1,
        outcome=PushOutcome.NOT_TRIED,
        reason="an earlier part failed",
    )


class Talkative:
    """A rank's socket from which something can be read whenever it is asked, until everything has been said."""

    def __init__(self, readable: socket.socket) -> None:
        self._readable = readable
        self._datagrams = [piece for number in range(NUM_REPORTS) for piece in split(encode(report(number)))]
        self._datagrams.reverse()

    def fileno(self) -> int:
        """One that is ready."""
        return self._readable.fileno()

    def setblocking(self, _: bool) -> None:
        """It never waits."""

    def recv(self, _: int) -> bytes:
        """The next datagram."""
        if not self._datagrams:
            raise BlockingIOError
        return self._datagrams.pop()

    def close(self) -> None:
        """End."""


async def test_a_rank_that_talks_without_pause_is_heard_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times as many reports as may wait are taken in one after the other, because the reader has its turn in between."""
    monkeypatch.setattr(channels, "MAX_PUSH_REPORTS", 2 * MAX_READ)
    here, there = socket.socketpair()
    with here, there:
        there.send(b"!")
        parent = RankChannels(1)
        rank: Any = Talkative(here)
        parent.attach([rank])
        async with asyncio.timeout(PATIENCE_S):
            heard = [(await parent.next_push()).seq for _ in range(NUM_REPORTS)]
        assert heard == list(range(NUM_REPORTS))
        parent.die("the test is over")
        parent.close()


async def test_what_is_taken_in_without_a_pause_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: all that can be read at once does not fit."""
    monkeypatch.setattr(channels, "MAX_PUSH_REPORTS", 2 * MAX_READ)
    monkeypatch.setattr(channels, "MAX_READ", NUM_REPORTS)
    here, there = socket.socketpair()
    with here, there:
        there.send(b"!")
        parent = RankChannels(1)
        rank: Any = Talkative(here)
        parent.attach([rank])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="QueueFull"):
            parent.check_alive()
        parent.close()
