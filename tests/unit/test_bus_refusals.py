"""What cannot be read: refused, counted always, logged now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from common.bus.port import Entry
from common.bus.refusals import LOG_EVERY_S, Refusals
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.codec import encode
from contracts.requests import CancelWork


class Log:
    """Remembers the lines."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        """Nothing is logged at this level."""
        raise AssertionError(event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Remember it."""
        self.lines.append({"event": event, **fields})


def test_the_first_of_a_row_is_logged_and_then_one_in_a_while() -> None:
    """The next line says how many were left out; another row has lines of its own; every one is counted."""

    async def scenario(clock: VirtualClock) -> None:
        log, metrics = Log(), Metrics()
        refusals = Refusals(log, clock, metrics)
        for _ in range(100):
            assert refusals.message("cancel", b"{", CancelWork, subject="s") is None
        assert refusals.message("tokens", b"{", CancelWork) is None
        assert [(line["row"], line["num_not_logged"]) for line in log.lines] == [("cancel", 0), ("tokens", 0)]
        await clock.sleep(LOG_EVERY_S)
        assert refusals.message("cancel", b"{", CancelWork) is None
        assert log.lines[-1]["num_not_logged"] == 99
        assert b'pdmesh_messages_refused_total{row="cancel"} 101.0' in metrics.exposition()

    run_virtual(scenario)


@pytest.mark.parametrize(("key", "taken"), [("r1-0", True), ("r2-0", False)])
def test_a_record_counts_at_its_own_key_alone(key: str, taken: bool) -> None:
    """What speaks of another key is somebody else's, whatever it says."""

    async def scenario(clock: VirtualClock) -> None:
        log = Log()
        refusals = Refusals(log, clock, Metrics())
        record = CancelWork(handoff_id="r1-0")
        found = refusals.record("workers", Entry(key, encode(record), 1), CancelWork, lambda each: each.handoff_id)
        assert found == (record if taken else None)
        assert [line["error_message"].partition(":")[0] for line in log.lines] == ([] if taken else ["key"])

    run_virtual(scenario)
