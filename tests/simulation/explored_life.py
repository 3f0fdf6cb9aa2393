"""One request of an explored world, without decode: its handoff at the broker, its prefill, and what is on its way for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import PartDone, PartsReport, PrefillFinished, RunPrefill
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.requests import SamplingParams, SubmitRequest
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import begin, step
from tests.simulation.explored_decode import NUM_TOKENS
from tests.simulation.explored_items import (
    DECODE,
    HANDOFF,
    PREFILL,
    ROUTE,
    Command,
    Decoded,
    Item,
    Numbers,
    Told,
    Write,
    meets_decode,
)
from tests.simulation.explored_ranks import RankSymmetry

_WHILE_OPEN = (
    ev.AskRefused,
    ev.PartsReported,
    ev.PrefillEnded,
    ev.CancelRequested,
    ev.DeadlinePassed,
    ev.WorkerGone,
)
"""Events that mean nothing to a handoff that has ended."""


class Life(NamedTuple):
    """One request. `bag` is what is on its way; once something of it may come twice. Prefill tells once that it `has_failed`."""

    handoff: int
    bag: tuple[int, ...]
    revision: int = 0
    is_running: bool = False
    is_stopped: bool = False
    landed: tuple[tuple[int, int], ...] = ()
    is_committed: bool = False
    has_failed: bool = False
    may_repeat: bool = False


class Lives:
    """How lives go on. Nothing is worked out twice."""

    def __init__(self, num_ranks: int) -> None:
        self.items: Numbers[Item] = Numbers()
        self.handoffs: Numbers[Handoff] = Numbers()
        self.lives: Numbers[Life] = Numbers()
        self._steps: dict[tuple[int, ev.Event], tuple[int, tuple[fx.Effect, ...]]] = {}
        self._alone: dict[int, tuple[int, ...]] = {}
        self._symmetry = RankSymmetry(num_ranks)
        self._handoff_images: dict[int, tuple[int, ...]] = {}
        self._item_images: dict[tuple[int, int], int] = {}
        self._least: dict[int, int] = {}
        self.planned = tuple(
            PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=source, dst_rank=destination)
            for source in range(num_ranks)
            for destination in range(num_ranks)
        )
        """Every source rank owes every destination rank one part."""

    def first(self, *, may_repeat: bool, cancels: bool, expires: bool) -> int:
        """A request that has just been submitted. If it `cancels`, its client leaves at some moment; if it `expires`, it is late."""
        handoff, effects = begin(_submitted(self.planned), Policy())
        number = self.handoffs.of(handoff)
        self._handoff_images[number] = (number,) * len(self._symmetry)  # nothing has been told of any rank
        leaves = Told(event=ev.CancelRequested(at_ns=0, reason="the client left"))
        life = Life(handoff=number, bag=(), may_repeat=may_repeat)
        if cancels:
            life = self._put(life, leaves)
        if expires:
            life = self._put(life, Told(event=ev.DeadlinePassed(at_ns=0)))
        return self.lives.of(self._perform(life, effects))

    def of(self, life: int) -> Life:
        """A life by its number."""
        return self.lives[life]

    def handoff_of(self, life: int) -> Handoff:
        """Its handoff at the broker."""
        return self.handoffs[self.lives[life].handoff]

    def at_decode(self, life: int) -> tuple[int, ...]:
        """What is on its way to decode."""
        return tuple(number for number in self.lives[life].bag if meets_decode(self.items[number]))

    def alone(self, life: int) -> tuple[int, ...]:
        """Every life that can be next without decode: something comes to the broker or to prefill, and may come again once."""
        if life not in self._alone:
            before = self.lives[life]
            found: list[int] = []
            for number in before.bag:
                item = self.items[number]
                if not meets_decode(item):
                    found += [self.lives.of(self._happen(each, item)) for each in self.without(before, number)]
            self._alone[life] = tuple(dict.fromkeys(found))
        return self._alone[life]

    def without(self, life: Life, number: int) -> list[Life]:
        """The life once something has come: it may be still to come again, once, unless it is the end of its decoding."""
        left = life._replace(bag=tuple(each for each in life.bag if each != number))
        if life.may_repeat and not isinstance(self.items[number], Decoded):
            return [left, life._replace(may_repeat=False)]
        return [left]

    def with_items(self, life: Life, items: tuple[Item, ...]) -> int:
        """The life with more on its way."""
        for item in items:
            life = self._put(life, item)
        return self.lives.of(life)

    def is_written(self, life: Life) -> bool:
        """Whether somebody has been let into its memory, and has not landed yet."""
        return any(isinstance(item, Write) and item.is_locked for item in map(self.items.__getitem__, life.bag))

    def lock(self, life: Life, write: Write) -> int:
        """The life after a write was let in: it lands at some moment."""
        return self.with_items(life, (msgspec.structs.replace(write, is_locked=True),))

    def land(self, life: Life, write: Write) -> int:
        """The life after a write: its rank reports all that it has written so far, unless prefill has been stopped."""
        life = life._replace(landed=tuple(sorted({*life.landed, (write.source, write.destination)})))
        if life.is_stopped:
            return self.lives.of(life)
        done = [to for source, to in life.landed if source == write.source]
        report = PartsReport(
            handoff_id=HANDOFF,
            incarnation=PREFILL.incarnation,
            source_rank=write.source,
            revision=len(done),
            parts=tuple(
                PartDone(
                    namespace=Namespace.TARGET,
                    role=Role.KEY,
                    layer=0,
                    destination_rank=to,
                    ranges=((0, NUM_TOKENS),),
                )
                for to in done
            ),
            num_bytes=0,
            push_ms=0.0,
        )
        return self.with_items(life, (Told(event=ev.PartsReported(at_ns=0, report=report)),))

    def fail(self, life: Life) -> int:
        """The life after a write that was refused: prefill fails, once, unless it has been stopped."""
        if life.is_stopped or life.has_failed:
            return self.lives.of(life)
        life = life._replace(has_failed=True)
        error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="stale generation")
        failed = PrefillFinished(handoff_id=HANDOFF, incarnation=PREFILL.incarnation, error=error)
        return self.with_items(life, (Told(event=ev.PrefillEnded(at_ns=0, message=failed)),))

    def drop_all_but_one(self, life: int, stale: Callable[[Write], bool]) -> int:
        """The life without writes that can only be refused: what one of them does, the others do not do again."""
        before = self.lives[life]
        writes = {number: item for number in before.bag if isinstance(item := self.items[number], Write)}
        useless = {number: write for number, write in writes.items() if not write.is_locked and stale(write)}
        bag = {number for number in before.bag if number not in useless}
        if useless and not before.is_stopped and not before.has_failed:
            one = next(iter(useless.values()))  # which ranks it is of does not matter any more
            bag.add(self.items.of(msgspec.structs.replace(one, source=0, destination=0)))
        return self.lives.of(before._replace(bag=tuple(sorted(bag))))

    def least(self, life: int) -> int:
        """Of all lives that differ only in which rank is which, the one with the lowest number."""
        if life not in self._least:
            alike = [self._image(life, way) for way in range(len(self._symmetry))]
            self._least |= dict.fromkeys(alike, min(alike))
        return self._least[life]

    def _image(self, life: int, way: int) -> int:
        before = self.lives[life]
        return self.lives.of(
            before._replace(
                handoff=self._handoff_images[before.handoff][way],
                bag=tuple(sorted(self._item_image(number, way) for number in before.bag)),
                landed=self._symmetry.pairs(way, before.landed),
            )
        )

    def _item_image(self, number: int, way: int) -> int:
        key = (number, way)
        if key not in self._item_images:
            self._item_images[key] = self.items.of(self._symmetry.item(way, self.items[number]))
        return self._item_images[key]

    def hears_of_crash(self, life: int) -> int:
        """The life with the news on its way that decode is gone."""
        return self.with_items(self.lives[life], (Told(event=ev.WorkerGone(at_ns=0, worker=DECODE)),))

    def _happen(self, life: Life, item: Item) -> Life:
        match item:
            case Told(event=event):
                return self._step(life, event)
            case Command(effect=fx.AskRun(message=run)):
                assert isinstance(run, RunPrefill)
                return self._run(life, run)
            case Command(effect=fx.AskRelease()):
                settled = ev.ReleaseSettled(at_ns=0, role=WorkerRole.PREFILL, acknowledged=True)
                return self._put(life._replace(is_stopped=True), Told(event=settled))
            case _:
                raise AssertionError(item)

    def _run(self, life: Life, command: RunPrefill) -> Life:
        if life.is_stopped:
            error = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
            return self._put(life, Told(event=ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=error)))
        life = self._put(life, Told(event=ev.RunAccepted(at_ns=0, rpc_ms=0.0)))
        if life.is_running:
            return life
        done = PrefillFinished(handoff_id=HANDOFF, incarnation=PREFILL.incarnation, first_token=5)
        life = self._put(life._replace(is_running=True), Told(event=ev.PrefillEnded(at_ns=0, message=done)))
        for part in self.planned:
            life = self._put(life, Write(source=part.src_rank, destination=part.dst_rank, grant=command.grant))
        return life

    def _step(self, life: Life, event: ev.Event) -> Life:
        after, effects = self._stepped(life.handoff, event)
        life = self._perform(life._replace(handoff=after), effects)
        # What says nothing any more, whenever it comes, need not come: one order of it is enough.
        bag = tuple(number for number in life.bag if not self._says_nothing(life, self.items[number]))
        return life._replace(bag=bag)

    def _stepped(self, handoff: int, event: ev.Event) -> tuple[int, tuple[fx.Effect, ...]]:
        if (handoff, event) not in self._steps:
            self._step_all_alike(handoff, event)
        return self._steps[handoff, event]

    def _step_all_alike(self, handoff: int, event: ev.Event) -> None:
        """Step with the ranks in every place that they can have: the broker's core must not care."""
        ways = range(len(self._symmetry))
        afters = []
        for way in ways:
            key = (self._handoff_images[handoff][way], self._symmetry.event(way, event))
            if key not in self._steps:
                after, effects = step(self.handoffs[key[0]], key[1])
                self._steps[key] = self.handoffs.of(after), effects
            afters.append(self._steps[key][0])
        for way in ways:
            images = tuple(afters[self._symmetry.then(way, other)] for other in ways)
            known = self._handoff_images.setdefault(afters[way], images)
            assert known == images, "ranks that change places are not alike to the broker"

    def _perform(self, life: Life, effects: tuple[fx.Effect, ...]) -> Life:
        written: list[ev.Event] = []
        for effect in effects:
            match effect:
                case fx.StoreRecord():
                    assert effect.last == (life.revision or None), "a write that cannot win"
                    life = life._replace(revision=life.revision + 1)
                    # At once: how late it may be, and what else may become of it, is explored for one handoff alone.
                    written.append(ev.RecordStored(at_ns=0, write=effect.write, revision=life.revision))
                case fx.AskReserve() | fx.AskRun() | fx.AskCommit() | fx.AskRelease():
                    if isinstance(effect, fx.AskCommit):
                        assert not life.is_committed, "I3: two commits"
                        life = life._replace(is_committed=True)
                    life = self._put(life, Command(effect=effect))
                case _:
                    pass  # for people, for the router, or only to hurry
        for event in written:
            life = self._step(life, event)
        return life

    def _put(self, life: Life, item: Item) -> Life:
        if self._says_nothing(life, item):
            return life
        return life._replace(bag=tuple(sorted({*life.bag, self.items.of(item)})))

    def _says_nothing(self, life: Life, item: Item) -> bool:
        """Whether an event changes and asks for nothing, now and later."""
        handoff = self.handoffs[life.handoff]
        if not isinstance(item, Told):
            return False
        if not handoff.terminal:
            return _is_outdated(handoff, item.event)
        if not handoff.forgotten and not isinstance(item.event, _WHILE_OPEN):
            return False
        after, effects = self._stepped(life.handoff, item.event)
        return not effects and after == life.handoff


def _is_outdated(handoff: Handoff, event: ev.Event) -> bool:
    """Whether a later report of the same rank, which says all of this and more, has come before."""
    if not isinstance(event, ev.PartsReported) or handoff.ledger is None:
        return False
    known = handoff.ledger.report_of((event.report.transfer, event.report.source_rank))
    return known is not None and event.report.revision <= known.revision


def _submitted(planned: tuple[PlannedPart, ...]) -> ev.Submitted:
    submit = SubmitRequest(
        handoff_id=HANDOFF,
        request_id="r",
        attempt=0,
        router_id="router-0",
        route=ROUTE,
        num_prompt_tokens=NUM_TOKENS,
        prompt_hash="h",
        sampling=SamplingParams(max_tokens=3, seed=1),
        timeout_ms=1000,
    )
    return ev.Submitted(
        at_ns=0,
        submit=submit,
        deadline_ns=1_000_000_000,
        deadline_at="2030-01-01T00:00:00+00:00",
        planned=planned,
        block_size=2 * NUM_TOKENS,
    )
