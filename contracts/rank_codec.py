"""Messages between a worker's process and its ranks as bytes, and how long they may be."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from contracts.errors import CodecError
from contracts.rank import RankCommand, RankMessage

MAX_RANK_MESSAGE_BYTES: Final = 8 << 20

# The most that msgpack takes: for a number below 2**32, for an item's other fields (its own header, that of its ids, a sequence's
# number below 2**64, a place and a count below 2**32, three flags), and for what a plan has beside its items.
_TOKEN_BYTES: Final = 5
_ITEM_BYTES: Final = 1 + 5 + 9 + 5 + 5 + 3
_PLAN_BYTES: Final = 64

_encoder: Final = msgspec.msgpack.Encoder()
_commands: Final = msgspec.msgpack.Decoder(RankCommand)
_messages: Final = msgspec.msgpack.Decoder(RankMessage)
_T = TypeVar("_T")


def encode(message: RankCommand | RankMessage) -> bytes:
    """One message. Raises `CodecError` above `MAX_RANK_MESSAGE_BYTES`."""
    data = _encoder.encode(message)
    if len(data) > MAX_RANK_MESSAGE_BYTES:
        name = type(message).__name__
        raise CodecError(f"{name} encodes to {len(data)} bytes; the rule is: at most {MAX_RANK_MESSAGE_BYTES}")
    return data


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CodecError(f"not a rank message: {error}") from error


def most_step_tokens(num_sequences: int) -> int:
    """How many tokens a `StepPlan` of so many sequences can carry, whatever their ids are; below 0 for too many sequences."""
    return (MAX_RANK_MESSAGE_BYTES - _PLAN_BYTES - num_sequences * _ITEM_BYTES) // _TOKEN_BYTES


def decode_command(data: bytes) -> RankCommand:
    """What a rank received. Raises `CodecError`."""
    return _decode(data, _commands)


def decode_message(data: bytes) -> RankMessage:
    """What the parent received. Raises `CodecError`."""
    return _decode(data, _messages)
