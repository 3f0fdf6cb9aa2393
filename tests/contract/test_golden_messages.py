"""What crosses a process boundary, byte for byte, against files that only change with the contract."""

from __future__ import annotations

import json

import msgspec
import pytest

from contracts import codec, rank, rank_codec
from contracts.codec import SCHEMA_VERSION, Versioned
from contracts.errors import CodecError
from tests.contract.golden_messages import FOLDER, bus_kinds, files, rank_kinds, tag_of
from tests.contract.golden_rank_samples import RANK_MESSAGES
from tests.contract.golden_samples import BUS_MESSAGES

BUS = pytest.mark.parametrize("message", BUS_MESSAGES, ids=tag_of)
RANKS = pytest.mark.parametrize("message", RANK_MESSAGES, ids=tag_of)

RankMessage = rank.RankCommand | rank.RankMessage


def golden(message: msgspec.Struct, suffix: str) -> bytes:
    """What the message's file holds."""
    return (FOLDER / f"{tag_of(message)}.{suffix}").read_bytes().removesuffix(b"\n")


def decoded(message: RankMessage, data: bytes) -> RankMessage:
    """Read it as its receiver does."""
    return rank_codec.decode_command(data) if isinstance(message, rank.RankCommand) else rank_codec.decode_message(data)


def test_every_message_has_a_golden_file_and_no_file_is_left_over() -> None:
    """A new message without a sample, and a file without a message, are both seen here."""
    assert {type(message) for message in BUS_MESSAGES} == bus_kinds()
    assert {type(message) for message in RANK_MESSAGES} == rank_kinds()
    assert set(FOLDER.iterdir()) == set(files())


@BUS
def test_bus_messages_encode_to_the_golden_bytes(message: Versioned) -> None:
    """The same message gives the same bytes as ever, and they decode to the same message."""
    data = golden(message, "json")
    assert codec.encode(message) == data
    assert codec.decode(data, type(message)) == message


@BUS
def test_bus_messages_ignore_unknown_fields(message: Versioned) -> None:
    """A field that a later build has added, at the top or below, is passed over."""
    fields = json.loads(golden(message, "json"))
    later = _with_unknown_fields(fields)
    assert later != fields
    assert codec.decode(json.dumps(later).encode(), type(message)) == message


@BUS
def test_bus_messages_of_a_newer_schema_are_refused(message: Versioned) -> None:
    """A message that says it needs a newer reader is not guessed at."""
    fields = json.loads(golden(message, "json"))
    fields["v"] = SCHEMA_VERSION + 1
    with pytest.raises(CodecError, match=f"schema version {SCHEMA_VERSION + 1}"):
        codec.decode(json.dumps(fields).encode(), type(message))


@BUS
def test_bus_messages_are_not_taken_for_another(message: Versioned) -> None:
    """The tag decides: the bytes of one message do not decode as any other."""
    data = golden(message, "json")
    for kind in bus_kinds() - {type(message)}:
        with pytest.raises(CodecError):
            codec.decode(data, kind)


@RANKS
def test_rank_messages_encode_to_the_golden_bytes(message: RankMessage) -> None:
    """The same for what a worker and its ranks say to each other."""
    data = bytes.fromhex(golden(message, "msgpack.hex").decode())
    assert rank_codec.encode(message) == data
    assert decoded(message, data) == message


@RANKS
def test_rank_messages_ignore_unknown_fields(message: RankMessage) -> None:
    """A field that the receiver does not know is passed over."""
    fields = msgspec.msgpack.decode(bytes.fromhex(golden(message, "msgpack.hex").decode()))
    assert decoded(message, msgspec.msgpack.encode(fields | {"added_later": 1})) == message


@RANKS
def test_rank_messages_that_are_cut_short_are_refused(message: RankMessage) -> None:
    """A datagram that lost its end is an error with a name."""
    data = rank_codec.encode(message)
    with pytest.raises(CodecError, match="not a rank message"):
        decoded(message, data[:-1])


def _with_unknown_fields(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_unknown_fields(each) for key, each in value.items()} | {"added_later": [1]}
    if isinstance(value, list):
        return [_with_unknown_fields(each) for each in value]
    return value
