"""Long messages between a worker's process and its ranks: in pieces, whole at the other end, and refused where no message holds them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from common.dataplane.port import DataPlane
from common.engine.port import EngineDeadError, EngineError
from common.engine.ranks.channels import RankChannels
from common.engine.ranks.datagrams import MAX_DATAGRAM_BYTES, Joiner, split
from common.engine.ranks.process import RankEnvironment, serve
from common.runtime.clock import SystemClock
from contracts.errors import CodecError, ErrorCode, InvalidValueError
from contracts.handoff import Grant, max_granted_blocks
from contracts.rank import (
    MAX_BOUND_BLOCKS,
    BindSequence,
    Done,
    PushTarget,
    StartRank,
    StepDone,
    StepItem,
    StepPlan,
    StopRank,
)
from contracts.rank_codec import MAX_RANK_MESSAGE_BYTES, decode_command, decode_message, encode, most_step_tokens
from contracts.requests import SamplingParams

WIDE = (1 << 32) - 1
TIMEOUT_S = 30.0


def plan(num_tokens: int, step: int = 1) -> StepPlan:
    """A step of one prompt, of ids that take as much room as ids can."""
    item = StepItem(seq=7, start=0, num_tokens=num_tokens, token_ids=(WIDE,) * num_tokens)
    return StepPlan(step=step, items=(item,))


@pytest.mark.parametrize(
    "num_bytes", [0, 1, MAX_DATAGRAM_BYTES - 1, MAX_DATAGRAM_BYTES, 2 * MAX_DATAGRAM_BYTES - 2, 10**6]
)
def test_a_message_comes_out_of_its_datagrams_as_it_was(num_bytes: int) -> None:
    """Nobody but the last datagram ends the message, none is longer than a socket pair takes, and none is empty, which is an end."""
    message = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    datagrams = list(split(message))
    assert all(1 <= len(datagram) <= MAX_DATAGRAM_BYTES for datagram in datagrams)
    assert len(datagrams) == max(1, -(-num_bytes // (MAX_DATAGRAM_BYTES - 1)))
    joiner = Joiner()
    for _ in range(2):
        assert [joiner.put(datagram) for datagram in datagrams] == [None] * (len(datagrams) - 1) + [message]


def test_a_message_that_was_given_up_makes_way_for_the_next() -> None:
    """A parent that stops in the middle of a command is heard all the same."""
    joiner = Joiner()
    begun, *_ = split(bytes(10**6))
    assert joiner.put(begun) is None
    assert [joiner.put(datagram) for datagram in split(b"stop")] == [b"stop"]


@pytest.mark.parametrize(
    ("datagrams", "text"),
    [
        ([b"\x00rest"], "has not begun"),
        ([b"\x03whole", b"\x02rest"], "has not begun"),
        ([b"\x07"], "flags: 7 of a datagram"),
        ([b"\x01" + bytes(MAX_RANK_MESSAGE_BYTES), b"\x02x"], f"more than {MAX_RANK_MESSAGE_BYTES} bytes"),
    ],
)
def test_datagrams_that_make_no_message_are_refused(datagrams: list[bytes], text: str) -> None:
    """A rest without a beginning, a flag that nobody sets, a message without an end."""
    joiner = Joiner()
    for datagram in datagrams[:-1]:
        joiner.put(datagram)
    with pytest.raises(CodecError, match=text):
        joiner.put(datagrams[-1])


@contextlib.contextmanager
def scripted_ranks(size: int) -> Iterator[tuple[list[socket.socket], list[StepPlan]]]:
    """Ends for `RankChannels`, whose other ends answer every step in a thread each, and what these heard."""
    heard: list[StepPlan] = []
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(size)]

    def answer(connection: socket.socket, rank: int) -> None:
        joiner = Joiner()
        while datagram := connection.recv(MAX_DATAGRAM_BYTES):
            message = joiner.put(datagram)
            command = None if message is None else decode_command(message)
            if isinstance(command, StopRank):
                return
            if isinstance(command, StepPlan):
                heard.append(command)
                done = StepDone(
                    rank=rank, step=command.step, tokens=(), started_ns=0, ended_ns=0, failed=(WIDE,) * 100_000
                )
                for piece in split(encode(done)):
                    connection.send(piece)

    threads = [
        threading.Thread(target=answer, args=(there, rank), daemon=True) for rank, (_, there) in enumerate(pairs)
    ]
    for thread in threads:
        thread.start()
    try:
        yield [here for here, _ in pairs], heard
    finally:
        for thread in threads:
            thread.join(TIMEOUT_S)
        for _, there in pairs:
            there.close()


def test_a_step_of_any_legal_size_reaches_every_rank_and_so_does_its_answer() -> None:
    """What takes megabytes is one command to the ranks, and what they answer may be long as well."""

    async def scenario() -> None:
        with scripted_ranks(2) as (connections, heard):
            channels = RankChannels(2)
            channels.attach(connections)
            long = plan(most_step_tokens(1))
            answers = await channels.ask([long, long], TIMEOUT_S)
            assert heard == [long, long]
            assert [(answer.rank, len(answer.failed)) for answer in answers if isinstance(answer, StepDone)] == [
                (0, 100_000),
                (1, 100_000),
            ]
            channels.dismiss()
            channels.close()

    asyncio.run(scenario())


def test_a_command_that_no_message_holds_fails_alone() -> None:
    """No rank is told of it, whoever asked gets an error of the command, and the next command is answered."""

    async def scenario() -> None:
        with scripted_ranks(2) as (connections, heard):
            channels = RankChannels(2)
            channels.attach(connections)
            too_long = plan(MAX_RANK_MESSAGE_BYTES // 5 + 1)
            with pytest.raises(EngineError, match=f"StepPlan encodes to .* at most {MAX_RANK_MESSAGE_BYTES}") as caught:
                await channels.ask([plan(1), too_long], TIMEOUT_S)
            assert caught.value.code is ErrorCode.INTERNAL
            assert heard == []
            await channels.ask([plan(1, 2), plan(1, 2)], TIMEOUT_S)
            assert [each.step for each in heard] == [2, 2]
            channels.dismiss()
            channels.close()
            with pytest.raises(EngineDeadError):
                await channels.ask([plan(1), plan(1)], TIMEOUT_S)

    asyncio.run(scenario())


def test_a_rank_hears_a_long_command_whole() -> None:
    """What it is told of in pieces is one command to it; the end of its parent in the middle of one is an end like any other."""
    heard: list[StartRank] = []

    def refuse(start: StartRank) -> DataPlane:
        heard.append(start)
        raise InvalidValueError(field="transport", value=start.transport, rule="none in this test")

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(TIMEOUT_S)
    environment = RankEnvironment(clock=SystemClock(), join=lambda _start: None, open_data_plane=refuse)
    rank = threading.Thread(target=serve, args=(there, environment), daemon=True)
    rank.start()
    start = StartRank(
        worker_id="w",
        incarnation="i",
        rank=0,
        tp=1,
        model_dir="m" * 10**6,
        block_size=1,
        num_blocks=1,
        num_slots=1,
        max_step_tokens=1,
        max_step_sequences=1,
    )
    for datagram in split(encode(start)):
        here.send(datagram)
    answer = Joiner().put(here.recv(MAX_DATAGRAM_BYTES))
    assert answer is not None
    done = decode_message(answer)
    assert isinstance(done, Done)
    assert done.error is not None
    assert done.error.code is ErrorCode.INVALID_REQUEST
    assert heard == [start]
    here.send(next(iter(split(encode(start)))))
    here.close()
    rank.join(TIMEOUT_S)
    assert not rank.is_alive()


@pytest.mark.parametrize("num_sequences", [1, 32, 4096])
def test_the_largest_step_fits_into_a_message(num_sequences: int) -> None:
    """The bound of a step's tokens holds for the widest numbers, and leaves little of the message."""
    most = most_step_tokens(num_sequences)
    items = [
        StepItem(
            seq=(1 << 64) - 1,
            start=WIDE,
            num_tokens=WIDE,
            token_ids=(WIDE,) * (most - num_sequences + 1 if number == 0 else 1),
        )
        for number in range(num_sequences)
    ]
    data = encode(StepPlan(step=(1 << 64) - 1, items=tuple(items)))
    assert MAX_RANK_MESSAGE_BYTES - 5 * num_sequences - 64 <= len(data) <= MAX_RANK_MESSAGE_BYTES


def test_the_longest_sequence_fits_into_a_message() -> None:
    """Its own blocks, and those of the grant that it is pushed to."""
    grant = Grant(
        worker_id="d" * 64,
        incarnation="i" * 64,
        generation=1 << 62,
        block_ids=(WIDE,) * max_granted_blocks(10),
        slot=WIDE,
        secret="0" * 32,
    )
    binding = BindSequence(
        seq=1 << 62,
        handoff_id="h" * 64,
        generation=1 << 62,
        block_ids=(WIDE,) * MAX_BOUND_BLOCKS,
        slot=WIDE,
        num_prompt_tokens=WIDE,
        sampling=SamplingParams(max_tokens=1, seed=1),
        push=PushTarget(grant=grant, num_cached_tokens=0),
    )
    assert len(encode(binding)) <= MAX_RANK_MESSAGE_BYTES
