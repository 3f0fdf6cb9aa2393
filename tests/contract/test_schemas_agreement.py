"""What a schema calls valid is what a decoder takes: for every message as it is, and for each way to break it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from common.schemas.json_schema import bus_schemas, rank_schemas, tag_of
from contracts import codec, rank, rank_codec
from contracts.codec import SCHEMA_VERSION, Versioned
from contracts.errors import CodecError
from tests.contract.golden_messages import FOLDER
from tests.contract.golden_messages import tag_of as tag_of_message
from tests.contract.golden_rank_samples import RANK_MESSAGES
from tests.contract.golden_samples import BUS_MESSAGES

BUS = {tag: Draft202012Validator(schema) for tag, schema in bus_schemas().items()}
RANKS = {tag: Draft202012Validator(schema) for tag, schema in rank_schemas().items()}
MAX_DEPTH = 3
RankMessage = rank.RankCommand | rank.RankMessage
WRONG: tuple[Any, ...] = (None, "x", -1, 1 << 64, [[]], {"type": "no_such_tag"})


@pytest.mark.parametrize("message", BUS_MESSAGES, ids=tag_of_message)
def test_schema_and_decoder_agree_on_every_message_of_the_bus(message: Versioned) -> None:
    """The golden file is valid; a changed field is valid by both or by neither; a decoder names what a schema refuses."""
    kind, golden = type(message), json.loads((FOLDER / f"{tag_of_message(message)}.json").read_bytes())
    validator = BUS[tag_of(kind)]
    validator.validate(golden)
    refused = 0
    for place, broken in _variants(golden):
        if len(place) > 1 and place[-1] == "type":
            continue  # a decoder needs no tag where only one kind of message can stand
        takes = _takes(broken, kind)
        assert validator.is_valid(broken) == takes, (place, broken)
        refused += not takes
    assert refused >= 3


@pytest.mark.parametrize("message", RANK_MESSAGES, ids=tag_of_message)
def test_schema_and_decoder_agree_on_every_message_to_a_rank(message: RankMessage) -> None:
    """The same for the messages in msgpack, which are read as what they say."""
    golden = msgspec.msgpack.decode(bytes.fromhex((FOLDER / f"{tag_of_message(message)}.msgpack.hex").read_text()))
    validator = RANKS[tag_of_message(message)]
    validator.validate(golden)
    for place, broken in _variants(golden):
        takes = _rank_takes(broken, command=isinstance(message, rank.RankCommand))
        if place == ("type",) or takes is None:
            continue  # here a decoder takes all messages of its direction, a schema one
        assert validator.is_valid(broken) == takes, (place, broken)


def test_a_newer_version_is_valid_by_no_schema() -> None:
    """As it is refused by every decoder: the fields may mean something else by then."""
    for message in BUS_MESSAGES:
        later = json.loads(codec.encode(message)) | {"v": SCHEMA_VERSION + 1}
        assert not BUS[tag_of_message(message)].is_valid(later)


def _takes(value: Any, kind: type[Versioned]) -> bool:
    try:
        codec.decode(json.dumps(value).encode(), kind)
    except CodecError:
        return False
    return True


def _rank_takes(value: Any, *, command: bool) -> bool | None:
    """Say whether it is taken; None for what nobody can send, since msgpack has no such number."""
    try:
        data = msgspec.msgpack.encode(value)
    except OverflowError:
        return None
    try:
        rank_codec.decode_command(data) if command else rank_codec.decode_message(data)
    except CodecError:
        return False
    return True


def _variants(golden: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """The message with one place in it left out, or holding something else; nested places, too."""
    for path in _places(golden):
        yield path, _changed(golden, path, leave_out=True)
        for wrong in WRONG:
            yield path, _changed(golden, path, value=wrong)
    yield (), {**golden, "added_later": [1]}


def _places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    steps: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        steps = iter(value.items())
    elif isinstance(value, list):
        steps = iter(enumerate(value[:1]))
    for step, each in steps:
        yield (*path, step)
        if len(path) < MAX_DEPTH:
            yield from _places(each, (*path, step))


def _changed(
    golden: dict[str, Any], path: tuple[str | int, ...], *, value: Any = None, leave_out: bool = False
) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(golden))
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    if leave_out:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed
