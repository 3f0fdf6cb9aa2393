"""Failpoints: faults that a worker plants into its own transfers on purpose, so that chaos tests can see them noticed.

A setting lists them, separated by ";":

    zero:role=key,layer=3,block=2; delay:layer=3,ms=50; swap:role=value,block=0,with=1; zero:role=ssm,source=1

Each is `action:key=value,...`. Actions:

- zero: the matching blocks (or state shards) arrive as zeros.
- swap: the matching block and block `with` of the same tensor arrive in each other's place (KEY and VALUE only).
- delay: the matching parts leave `ms` milliseconds late.
- drop: the matching parts are neither sent nor reported.
- fail: transfers with a matching part fail, before a byte moves.
- link: transfers over a matching link (`source`, `destination`) take at least `ms` milliseconds, and their bytes go over it one after
  the other at `mbs` megabytes (10**6 bytes) a second; 0 or no `mbs` is no bound. A model of a slow network, for measurements.

Keys narrow what matches; one that is left out matches everything: `namespace` (target, draft), `role` (key, value, conv, ssm,
bootstrap), `layer`, `source` and `destination` (tensor-parallel ranks), `block` (the request's block index, counted from 0; needed by swap).
A failpoint that names a block never matches CONV, SSM or BOOTSTRAP, which have none. Only the side that moves the bytes looks at failpoints: the
prefill worker that pushes, the decode worker that pulls. There a delay holds up the whole shard, and a state is dropped or zeroed
before it is merged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

import msgspec

from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, Role

_FIELD: Final = "failpoints"
_MAX_TEXT: Final = 4096


class Action(enum.StrEnum):
    """What a failpoint does."""

    ZERO = "zero"
    SWAP = "swap"
    DELAY = "delay"
    DROP = "drop"
    FAIL = "fail"
    LINK = "link"


_NUMBERS: Final = {
    "layer": "layer",
    "source": "source",
    "destination": "destination",
    "block": "block",
    "with": "other",
    "ms": "delay_ms",
    "mbs": "mb_per_s",
}
_NEEDED: Final = {
    Action.ZERO: (),
    Action.SWAP: ("block", "with"),
    Action.DELAY: ("ms",),
    Action.DROP: (),
    Action.FAIL: (),
    Action.LINK: ("ms",),
}
_ONLY_FOR: Final = {
    "with": frozenset({Action.SWAP}),
    "ms": frozenset({Action.DELAY, Action.LINK}),
    "mbs": frozenset({Action.LINK}),
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What is being sent: one tensor's layer from one rank to another."""

    namespace: Namespace
    role: Role
    layer: int
    source: int
    destination: int


class Failpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One planted fault; None matches everything."""

    action: Action
    namespace: Namespace | None = None
    role: Role | None = None
    layer: int | None = None
    source: int | None = None
    destination: int | None = None
    block: int | None = None
    other: int | None = None
    delay_ms: int = 0
    mb_per_s: int = 0

    def matches(self, part: Part) -> bool:
        """Whether the part is meant, blocks aside."""
        wanted = (self.namespace, self.role, self.layer, self.source, self.destination)
        actual = (part.namespace, part.role, part.layer, part.source, part.destination)
        if self.block is not None and not part.role.is_paged:
            return False
        return all(want is None or want == value for want, value in zip(wanted, actual, strict=True))


class Failpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The failpoints of one worker. Falsy when there are none, which is how it should be."""

    points: tuple[Failpoint, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.points)

    def delay_ms(self, part: Part) -> int:
        """How many milliseconds late the part is to leave."""
        return sum(point.delay_ms for point in self._matching(Action.DELAY, part))

    def is_dropped(self, part: Part) -> bool:
        """Whether the part is to be neither sent nor reported."""
        return any(True for _ in self._matching(Action.DROP, part))

    def is_failed(self, part: Part) -> bool:
        """Whether a transfer with the part is to fail."""
        return any(True for _ in self._matching(Action.FAIL, part))

    def link(self, source: int, destination: int) -> tuple[int, int]:
        """What a link between two ranks is like: latency in ms, and 10**6 bytes a second (0: no bound). Of several, the slowest."""
        found = [
            point
            for point in self.points
            if point.action is Action.LINK
            and point.source in {None, source}
            and point.destination in {None, destination}
        ]
        rates = [point.mb_per_s for point in found if point.mb_per_s]
        return max((point.delay_ms for point in found), default=0), min(rates, default=0)

    def is_zeroed(self, part: Part, block: int | None = None) -> bool:
        """Whether the request's block (None: a state shard) is to arrive as zeros."""
        return any(point.block in {None, block} for point in self._matching(Action.ZERO, part))

    def source_block(self, part: Part, block: int) -> int:
        """The request's block whose bytes are to be sent in the place of `block`: itself, unless a swap names it."""
        for point in self._matching(Action.SWAP, part):
            if block == point.block and point.other is not None:
                return point.other
            if block == point.other and point.block is not None:
                return point.block
        return block

    def _matching(self, action: Action, part: Part) -> Iterator[Failpoint]:
        return (point for point in self.points if point.action is action and point.matches(part))


def parse_failpoints(text: str) -> Failpoints:
    """Read the setting. Raises `InvalidValueError` that names the failpoint and what is wrong with it; "" is no failpoints."""
    if len(text) > _MAX_TEXT:
        raise InvalidValueError(field=_FIELD, value=text, rule=f"at most {_MAX_TEXT} characters")
    return Failpoints(points=tuple(_parse_one(item.strip()) for item in text.split(";") if item.strip()))


def _parse_one(item: str) -> Failpoint:
    name, _, rest = item.partition(":")
    try:
        action = Action(name.strip())
    except ValueError:
        raise InvalidValueError(field=_FIELD, value=item, rule=f"begins with one of {', '.join(Action)}") from None
    given: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in rest.split(","))):
        key, equals, value = (text.strip() for text in pair.partition("="))
        if not equals or not value:
            raise InvalidValueError(field=_FIELD, value=item, rule=f"key=value, not {pair!r}")
        if key in given:
            raise InvalidValueError(field=_FIELD, value=item, rule=f"key {key!r} at most once")
        given[key] = value
    fields = {key: _parse_value(item, action, key, value) for key, value in given.items()}
    for key in _NEEDED[action]:
        if key not in fields:
            raise InvalidValueError(field=_FIELD, value=item, rule=f"{action} needs {key!r}")
    try:
        point = msgspec.convert(
            {"action": action, **{_NUMBERS.get(key, key): value for key, value in fields.items()}}, Failpoint
        )
    except msgspec.ValidationError as error:
        raise InvalidValueError(field=_FIELD, value=item, rule=f"known names ({error})") from error
    if point.block is not None and point.role is not None and not point.role.is_paged:
        raise InvalidValueError(field=_FIELD, value=item, rule=f"{point.role} has no blocks")
    if action is Action.SWAP and point.block == point.other:
        raise InvalidValueError(field=_FIELD, value=item, rule="swap needs two different blocks")
    if action in {Action.DELAY, Action.DROP, Action.FAIL} and point.block is not None:
        raise InvalidValueError(field=_FIELD, value=item, rule=f"{action} is for whole parts, without 'block'")
    if action is Action.LINK and (point.namespace, point.role, point.layer, point.block) != (None,) * 4:
        raise InvalidValueError(
            field=_FIELD, value=item, rule="link is for all that goes from 'source' to 'destination'"
        )
    return point


def _parse_value(item: str, action: Action, key: str, value: str) -> str | int:
    if key in {"namespace", "role"}:
        return value
    if key not in _NUMBERS:
        known = ("namespace", "role", *_NUMBERS)
        raise InvalidValueError(field=_FIELD, value=item, rule=f"keys are {', '.join(known)}, not {key!r}")
    if key in _ONLY_FOR and action not in _ONLY_FOR[key]:
        rule = f"key {key!r} is for {' and '.join(sorted(_ONLY_FOR[key]))} alone"
        raise InvalidValueError(field=_FIELD, value=item, rule=rule)
    if not (value.isascii() and value.isdigit()):
        raise InvalidValueError(field=_FIELD, value=item, rule=f"{key} is a whole number of 0 or more, not {value!r}")
    return int(value)
