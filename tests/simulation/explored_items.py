"""What is on its way between the machines of an explored world, and numbers for things: equal things have the same one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

import msgspec

from contracts.handoff import Grant
from contracts.requests import DisaggregatedRoute, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev

HANDOFF: Final = "r-0"
"""Every request is a world of its own to its broker: all have the same id, and equal lives are equal."""
PREFILL: Final = WorkerRef(worker_id="p0", incarnation="ip")
DECODE: Final = WorkerRef(worker_id="d0", incarnation="id")
ROUTE: Final = DisaggregatedRoute(prefill=PREFILL, decode=DECODE)

T = TypeVar("T", bound=Hashable)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """The broker asks a worker for something: an effect on its way."""

    effect: fx.AskReserve | fx.AskRun | fx.AskCommit | fx.AskRelease


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Something happens to the request at the broker: an event on its way."""

    event: ev.Event


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """What one source rank writes into one destination rank, under a grant. One `is_locked` has been let in, and lands whatever happens."""

    source: int
    destination: int
    grant: Grant
    is_locked: bool = False


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """Decode has computed the last token of a request that it had taken over."""


Item = Command | Told | Write | Decoded


def meets_decode(item: Item) -> bool:
    """Whether it comes to decode, where requests meet; else it concerns its own request alone."""
    match item:
        case Told():
            return False
        case Write() | Decoded():
            return True
        case Command(effect=fx.AskRun()):
            return False
        case Command(effect=fx.AskRelease(role=role)):
            return role is WorkerRole.DECODE
        case Command():
            return True


class Numbers(Generic[T]):
    """Things by number."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._things: list[T] = []

    def of(self, thing: T) -> int:
        """The number of a thing."""
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> T:
        return self._things[number]
