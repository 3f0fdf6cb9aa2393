"""More faults to plant, one for each judge of the simulation that had none: what it says tells that it is that judge who finds it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import msgspec
import pytest

from common.bus import rpc
from common.bus.port import Message
from common.bus.queues import QueuedSubscription
from common.bus.rpc import RefusedError
from common.runtime.clock import Clock
from common.worker import host
from common.worker.core.admission import NewWork
from common.worker.core.scheduler import Scheduler
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import EngineLoop
from common.worker.host import WorkerHost
from common.worker.replica_set import ReplicaSet
from common.worker.service import WorkerService
from contracts.errors import CodecError, ErrorCode
from contracts.handoff import HandoffRecord
from contracts.rank import Extension
from contracts.requests import TokenFrame
from services.broker.live import Live
from services.broker.records import Records
from services.broker.strays import Strays
from services.decode import verification
from services.router.core.course import Course
from services.router.core.text_stream import TextPiece, TextStream
from services.router.generation import Generator, Sink
from services.router.interruption import Interruptible
from services.router.token_inbox import Mailbox
from tests.simulation.planted_faults import Plant


def leave_every_second_record(patch: pytest.MonkeyPatch) -> None:
    """A broker that begins to lead passes over every second record that it finds."""
    inner = Records.left_over

    async def left_over(
        records: Records, unreadable: Callable[[str, CodecError], None]
    ) -> list[tuple[HandoffRecord, int]]:
        return (await inner(records, unreadable))[1::2]

    patch.setattr(Records, "left_over", left_over)


def never_look_over_records(patch: pytest.MonkeyPatch) -> None:
    """A broker does not look again at the records of which it knows nothing."""
    patch.setattr(Strays, "expect", lambda _strays: None)


def fail_in_a_callback(patch: pytest.MonkeyPatch) -> None:
    """A function raises that the loop calls: nobody waits for it."""
    inner = Live.stepped

    def fail() -> None:
        raise RuntimeError("planted")

    def stepped(live: Live) -> None:
        asyncio.get_running_loop().call_soon(fail)
        inner(live)

    patch.setattr(Live, "stepped", stepped)


def fail_to_drain(patch: pytest.MonkeyPatch) -> None:
    """A worker that is told to end fails over it."""

    async def drain(_host: WorkerHost) -> None:
        raise RuntimeError("planted")

    patch.setattr(WorkerHost, "drain", drain)


def lose_the_end_of_a_grant(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker forgets the last block that it was granted, and writes there all the same."""
    inner = EngineLoop._bind

    async def bind(loop: EngineLoop, sequence: Sequence) -> None:
        push = sequence.push
        if push is not None:
            grant = msgspec.structs.replace(push.grant, block_ids=push.grant.block_ids[:-1])
            sequence.push = msgspec.structs.replace(push, grant=grant)
        await inner(loop, sequence)

    patch.setattr(EngineLoop, "_bind", bind)


def end_answers_early(patch: pytest.MonkeyPatch) -> None:
    """A router takes an answer for stopped behind its first tokens."""
    inner = TextStream.push

    def push(stream: TextStream, token_ids: Items[int]) -> TextPiece:
        piece = inner(stream, token_ids)
        return dataclasses.replace(piece, stopped=bool(piece.token_ids))

    patch.setattr(TextStream, "push", push)


def end_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A router takes every attempt that fails for a complete answer, and says so to nobody."""

    async def ended_silently(_generator: Generator, _course: Course, _sink: Sink) -> bool:
        return True

    patch.setattr(Generator, "_ended_silently", ended_silently)


def believe_digests(patch: pytest.MonkeyPatch) -> None:
    """A worker finds every cache to be the one that was computed."""
    patch.setattr(verification, "differences", lambda _expected, _found: ())


def begin_a_token_early(patch: pytest.MonkeyPatch) -> None:
    """A decode worker computes the last token of the prompt once more."""
    inner = Scheduler.start

    def start(scheduler: Scheduler, sequence: Sequence) -> None:
        if sequence.num_computed == sequence.num_prompt_tokens > 1:
            sequence.num_computed -= 1
        inner(scheduler, sequence)

    patch.setattr(Scheduler, "start", start)


def grow_into_others(patch: pytest.MonkeyPatch) -> None:
    """Ranks are told to give a growing sequence blocks that another one has."""
    inner = EngineLoop._extend

    async def extend(loop: EngineLoop, extensions: tuple[Extension, ...]) -> None:
        held = loop._pool.held
        stolen = tuple(
            msgspec.structs.replace(extension, block_ids=held[0].block_ids[:1])
            if held[0].block_ids[:1] != extension.block_ids
            else extension
            for extension in extensions
        )
        await inner(loop, stolen)

    patch.setattr(EngineLoop, "_extend", extend)


def trust_indeterminate_releases(patch: pytest.MonkeyPatch) -> None:
    """A worker takes memory for free that some writer may still touch."""

    async def release(loop: EngineLoop, seq: int, timeout_ms: int) -> bool:
        await loop.engine.release((seq,), loop._pool.next_generation(), timeout_ms)
        return True

    patch.setattr(EngineLoop, "_release", release)


def never_look_after_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Memory that some writer may have touched stays away for ever, however little it is."""

    async def retry_quarantine(_loop: EngineLoop) -> None:
        pass

    async def wait_overrun(_replicas: ReplicaSet, _clock: Clock) -> str:
        await asyncio.Event().wait()
        return ""

    patch.setattr(EngineLoop, "retry_quarantine", retry_quarantine)
    patch.setattr(host, "wait_overrun", wait_overrun)


def turn_away_the_third(patch: pytest.MonkeyPatch) -> None:
    """A worker takes two handoffs in its life, and says that it is ready for more."""
    inner = WorkerService.check_new

    def check_new(service: WorkerService, command: NewWork, num_tokens: int) -> None:
        if service.table._last_seq > 1:
            raise RefusedError(command.handoff_id, ErrorCode.OVERLOADED, "planted")
        inner(service, command, num_tokens)

    patch.setattr(WorkerService, "check_new", check_new)


def keep_little(patch: pytest.MonkeyPatch) -> None:
    """A connection has room for one message that waits to be read."""
    inner = QueuedSubscription.offer

    def offer(queue: QueuedSubscription, message: Message) -> None:
        queue._max_pending = 1
        inner(queue, message)

    patch.setattr(QueuedSubscription, "offer", offer)


def handle_one_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A service has room for one request of its peers."""
    patch.setattr(rpc, "MAX_HANDLERS", 1)


def hold_one_frame(patch: pytest.MonkeyPatch) -> None:
    """A router has no room for what a request has not read yet."""
    inner = Mailbox.put

    def put(mailbox: Mailbox, frame: TokenFrame) -> None:
        mailbox._limit = 0
        inner(mailbox, frame)

    patch.setattr(Mailbox, "put", put)


def ignore_deadlines(patch: pytest.MonkeyPatch) -> None:
    """A router waits for a request as long as it takes."""

    async def enter(scope: Interruptible) -> Interruptible:
        scope._timeout = asyncio.timeout(None)
        await scope._timeout.__aenter__()
        return scope

    patch.setattr(Interruptible, "__aenter__", enter)


OVERSIGHTS: Final[dict[str, tuple[Plant, str, str]]] = {
    "leave every second record": (leave_every_second_record, "I5", "nobody goes on with"),
    "never look over records": (never_look_over_records, "I5", "for ever"),
    "keep little": (keep_little, "I7", "a queue has"),
    "handle one at a time": (handle_one_at_a_time, "I7", "no room for another rpc"),
    "hold one frame": (hold_one_frame, "I7", "does not read"),
    "ignore deadlines": (ignore_deadlines, "I5", "after its deadline"),
    "fail in a callback": (fail_in_a_callback, "no mistakes", "planted"),
    "fail to drain": (fail_to_drain, "no mistakes", "planted"),
    "lose the end of a grant": (lose_the_end_of_a_grant, "I2", "of a grant of"),
    "end answers early": (end_answers_early, "I4", "tokens: stop"),
    "end without an end": (end_without_an_end, "I5", "without an end"),
    "believe digests": (believe_digests, "I3", "not the one that was computed"),
    "begin a token early": (begin_a_token_early, "I3", "was begun at token"),
    "grow into others": (grow_into_others, "I1", "added to"),
    "trust indeterminate releases": (trust_indeterminate_releases, "I2", "wrote into"),
    "never look after quarantine": (never_look_after_quarantine, "I6", "are free"),
    "turn away the third": (turn_away_the_third, "liveness", "asked now"),
}
"""Each fault, the invariant that it breaks, and what is said of it."""
