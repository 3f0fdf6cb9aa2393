"""A rank tells its worker what it has refused: the first at once, the rest together; nobody who refuses waits for it."""

from __future__ import annotations

import queue
import threading

import pytest

from common.dataplane.refusal_counts import RefusalCounts
from common.engine.port import Refused
from common.engine.ranks.refusal_news import RefusalNews
from common.engine.transfer import refusal_reports
from common.engine.transfer.refusal_reports import RefusalReports
from contracts.dataplane import Asked, RefusalReason
from contracts.rank import RefusedCount, RefusedTransfers

STALE = (Asked.WRITE, RefusalReason.STALE)
SECRET = (Asked.READ, RefusalReason.SECRET)
PATIENCE_S = 60.0


def report(rank: int, **counts: int) -> RefusedTransfers:
    """So many stale writes and reads without their secret."""
    keys = {"stale": STALE, "secret": SECRET}
    told = tuple(RefusedCount(asked=keys[name][0], reason=keys[name][1], count=num) for name, num in counts.items())
    return RefusedTransfers(rank=rank, counts=told)


def test_a_flood_of_refusals_is_a_message_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is told at once; a thousand that come while it is being told are one message, which says all."""
    monkeypatch.setattr(refusal_reports, "TELL_EVERY_S", 0.0)
    told: queue.Queue[RefusedTransfers] = queue.Queue()
    gate = threading.Event()

    def emit(message: RefusedTransfers) -> None:
        told.put(message)
        assert gate.wait(PATIENCE_S)

    counts = RefusalCounts()
    reports = RefusalReports(1, counts, emit)
    counts.add(*STALE)
    assert told.get(timeout=PATIENCE_S) == report(1, stale=1)
    for _ in range(999):
        counts.add(*STALE)
    counts.add(*SECRET)
    gate.set()
    assert told.get(timeout=PATIENCE_S) == report(1, secret=1, stale=1000)
    reports.close()
    reports.close()
    counts.add(*STALE)
    assert told.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "refusal-reports"]


def test_a_rank_whose_parent_has_gone_tells_nobody() -> None:
    """The thread ends; refusing goes on."""
    tried = threading.Event()

    def emit(_message: RefusedTransfers) -> None:
        tried.set()
        raise BrokenPipeError

    counts = RefusalCounts()
    reports = RefusalReports(0, counts, emit)
    counts.add(*STALE)
    assert tried.wait(PATIENCE_S)
    counts.add(*STALE)
    reports.close()
    assert counts.counts == {STALE: 2}


def test_the_words_of_all_ranks_are_summed_up() -> None:
    """Each says all since its start, so that the latest of each is the truth; a watcher that comes late hears it."""
    news = RefusalNews()
    news.put(0, report(0, stale=1))
    news.put(1, report(1, stale=2, secret=1))
    told: list[Refused] = []
    news.listen(told.append)
    news.put(0, report(0, stale=5))
    assert told == [{STALE: 3, SECRET: 1}, {STALE: 7, SECRET: 1}]
