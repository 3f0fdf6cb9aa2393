"""I7: what has a bound keeps within it. In a simulation nothing ever comes near one, so that whatever is turned away for it is a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from common.bus.observer import NoObserver
from common.runtime.tasks import BoundedTasks, Work
from tests.simulation.verdicts import Verdicts

_ONE_AT_A_TIME: Final = "quarantine-"
"""Tasks that are started again and again, and left out while the last one still runs."""


class BoundsObserver(NoObserver):
    """Hears of messages that no queue of a connection had room for."""

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts

    def messages_dropped(self, count: int) -> None:
        """See `BusObserver.messages_dropped`."""
        self._verdicts.broken("I7", f"a queue has thrown away {count} messages")


@contextmanager
def watched_tasks(verdicts: Verdicts) -> Iterator[None]:
    """Note work of any service for which there was no room, while this lasts."""
    inner = BoundedTasks.try_start

    def try_start(tasks: BoundedTasks, work: Work) -> bool:
        is_started = inner(tasks, work)
        if not is_started and not tasks._name.startswith(_ONE_AT_A_TIME):
            verdicts.broken("I7", f"there was no room for another {tasks._name}")
        return is_started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedTasks, "try_start", try_start)
        yield
