"""Requests on a prefill and a decode worker, as pure machines and bags of messages between them.

The broker's `step` runs once for each request; decode's memory is the real pool, what is over is in the real table. A transfer is
let in, if its grant is good, and lands later: what is taken back meanwhile lies in quarantine until then. Everything that is on its
way may come in any order; once something of the first request comes twice (of the second would be the same with other names), and
once decode dies. At the end, when the bags are empty, everything must be over and given back.

What is not here: no message is lost, so that nothing needs to be asked again; every record is written at once; prefill never dies.
Orders of those are explored for one handoff alone, in the broker's core. Without a planted fault bytes land outside their grant only
when the pool gives a block away that is in use: I2 cannot break alone, but where quarantine is forgotten.

Five things keep the worlds few, and no invariant is lost by them:

- Two requests are alike: of two worlds that differ only in which one is which, one is enough. So are the ranks of a side.
- Requests meet at decode alone. Where all that is on its way for one of them comes to its broker or to its prefill, nothing that
  happens to the other one can matter to it, or it to that: those items come first. Each request still gets into every state
  that it can get into, beside one state of the other.
- When decode has died, requests do not meet any more: all that they ask of the next start is refused, which gives nobody memory.
  So each goes on in a world of its own, and only how far it was counts. Hence also a death may come where items come first.
- Of writes under a grant that is over each can only be refused, and prefill fails once: one of them is enough.
- A report that comes behind a later one of its rank says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from contracts.handoff import HandoffState
from tests.simulation.explored_decode import DecodeModel
from tests.simulation.explored_items import Numbers, Write
from tests.simulation.explored_life import Life, Lives

_MAX_LIVES: Final = 1 << 22
_NEXT_START: Final = "id2"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is explored. At some moment the client of the first request leaves, if it `cancels`, and its deadline passes, if it `expires`.

    Without `checks` stale writes are let in.

    Without `reduces` every order is walked through, also where no order matters.
    """

    num_requests: int
    num_ranks: int
    num_blocks: int
    may_crash: bool = False
    may_repeat: bool = False
    cancels: bool = False
    expires: bool = False
    checks: bool = True
    reduces: bool = True


class World(NamedTuple):
    """Everything at one moment, by numbers: the life of each request, and decode. A request that decode's death left has one of its own."""

    lives: tuple[int, ...]
    decode: int
    may_crash: bool

    @property
    def packed(self) -> int:
        """The world as one number: millions of them fit into memory."""
        number = self.decode
        for life in self.lives:
            assert life < _MAX_LIVES
            number = number * _MAX_LIVES + life
        return (number << 1 | self.may_crash) << 1 | (len(self.lives) - 1)

    @classmethod
    def unpacked(cls, number: int) -> World:
        """The world that a number stands for."""
        num_lives, may_crash, number = (number & 1) + 1, bool(number >> 1 & 1), number >> 2
        lives: tuple[int, ...] = ()
        for _ in range(num_lives):
            number, life = divmod(number, _MAX_LIVES)
            lives = (life, *lives)
        return cls(lives, number, may_crash)


class Explored:
    """The worlds of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._lives = Lives(scenario.num_ranks)
        self._models: list[DecodeModel] = []
        self._keys: Numbers[tuple[object, ...]] = Numbers()
        self._met: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self._swaps: dict[int, int] = {}
        self._settlements: dict[tuple[int, int, int], int] = {}

    def first(self) -> World:
        """All requests have just been submitted."""
        scenario, lives = self.scenario, self._lives
        requests = [
            lives.first(
                may_repeat=scenario.may_repeat and not number,
                cancels=scenario.cancels and not number,
                expires=scenario.expires and not number,
            )
            for number in range(scenario.num_requests)
        ]
        decode = self._number(DecodeModel.start("id", scenario.num_blocks))
        return self._canonical(World(tuple(requests), decode, scenario.may_crash))

    def successors(self, world: World) -> Iterator[World]:
        """Every world that can be next: something in a bag comes, and may come again once."""
        requests = range(len(world.lives))
        if self.scenario.reduces:
            for request in requests:
                life = world.lives[request]
                alone = self._lives.alone(life)
                if alone and not self._lives.at_decode(life):
                    requests = range(request, request + 1)
                    break
        for request in requests:
            yield from self._of(world, request)
        if world.may_crash:
            gone = self._number(DecodeModel.start(_NEXT_START, self.scenario.num_blocks))
            lives = tuple(map(self._lives.hears_of_crash, world.lives))
            for each in ((life,) for life in lives) if self.scenario.reduces else (lives,):
                yield self._canonical(World(each, gone, may_crash=False))

    def is_over(self, world: World) -> bool:
        """Whether nothing is on its way."""
        return not any(self._lives.of(life).bag for life in world.lives)

    def states(self, world: World) -> list[HandoffState]:
        """How far each request is."""
        return [self._lives.handoff_of(life).state for life in world.lives]

    def check_end(self, world: World) -> None:
        """What holds when nothing is on its way any more."""
        decode = self._models[world.decode]
        for number in world.lives:
            life, handoff = self._lives.of(number), self._lives.handoff_of(number)
            assert handoff.terminal, f"I5: {handoff.handoff_id} is {handoff.state} for ever"
            assert handoff.forgotten, f"I6: somebody may hold memory of {handoff.handoff_id}"
            assert life.is_stopped or not life.is_running, "I6: prefill holds memory"
        assert not decode.memory, "I6: decode holds memory"
        assert not decode.quarantined, "I6: decode has memory in quarantine"
        assert decode.pool.num_free_blocks == decode.pool.num_blocks, "I6: blocks are missing"

    def _of(self, world: World, request: int) -> Iterator[World]:
        life = world.lives[request]
        for after in self._lives.alone(life):
            yield self._canonical(world._replace(lives=_replaced(world.lives, request, after)))
        for after, decode in self._meetings(request, life, world.decode):
            yield self._canonical(world._replace(lives=_replaced(world.lives, request, after), decode=decode))

    def _meetings(self, request: int, life: int, decode: int) -> tuple[tuple[int, int], ...]:
        """Something of a request comes to decode: what becomes of both."""
        key = (request, life, decode)
        if key not in self._met:
            before = self._lives.of(life)
            self._met[key] = tuple(
                self._meet(request, each, number, decode)
                for number in self._lives.at_decode(life)
                for each in self._lives.without(before, number)
            )
        return self._met[key]

    def _meet(self, request: int, life: Life, number: int, decode: int) -> tuple[int, int]:
        item, model = self._lives.items[number], self._models[decode].copy()
        is_written = self._lives.is_written(life)
        if isinstance(item, Write) and not item.is_locked:
            is_let_in = model.lets_in(request, item, checks=self.scenario.checks)
            return (self._lives.lock(life, item) if is_let_in else self._lives.fail(life)), decode
        if isinstance(item, Write):
            model.land(request, item, is_written=is_written)
            model.pool.check_integrity()
            return self._lives.land(life, item), self._number(model)
        is_whole = len(life.landed) == len(self._lives.planned)
        items = model.obey(request, item, is_whole=is_whole, is_written=is_written)
        after = self._lives.with_items(life, items)
        model.pool.check_integrity()
        assert model.incarnation != _NEXT_START or not model.memory, (
            "a request of the dead start has memory of the next one"
        )
        return after, self._number(model)

    def _number(self, model: DecodeModel) -> int:
        number = self._keys.of(model.key())
        if number == len(self._models):
            self._models.append(model)
        return number

    def _swapped(self, decode: int) -> int:
        if decode not in self._swaps:
            self._swaps[decode] = self._number(self._models[decode].swapped())
        return self._swaps[decode]

    def _canonical(self, world: World) -> World:
        """One of all worlds that differ in nothing that matters."""
        if not self.scenario.reduces:
            return world
        if self.scenario.checks:
            lives = [self._settled(request, life, world.decode) for request, life in enumerate(world.lives)]
            world = world._replace(lives=tuple(lives))
        world = world._replace(lives=tuple(map(self._lives.least, world.lives)))
        if len(world.lives) == 1:
            return world
        first, second = world.lives
        return min(world, World((second, first), self._swapped(world.decode), world.may_crash))

    def _settled(self, request: int, life: int, decode: int) -> int:
        key = (request, life, decode)
        if key not in self._settlements:
            model = self._models[decode]
            self._settlements[key] = self._lives.drop_all_but_one(life, partial(model.is_stale, request))
        return self._settlements[key]


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
