"""Real ranks behind worker services: what decode pulls itself gives the reference's tokens, whichever way it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.worker.core.doubts import MAX_FAILED_IN_A_ROW
from common.worker.settings import PulledRoles
from contracts import subjects
from contracts.codec import decode
from contracts.dataplane import Asked, RefusalReason, Transport
from contracts.errors import ErrorCode
from contracts.events import EventName, HandoffEvent
from contracts.handoff import Grant, PrefillFinished
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.subjects import WorkerVerb
from contracts.workers import SettingChanged, SetWorker
from services.decode.service import DecodeService
from tests.integration.pull_ranks import NUM_TOKENS, PROMPTS, SLOTS, ranks_mesh

STATES = {Role.CONV, Role.SSM}
PAGED = {Role.KEY, Role.VALUE}


@pytest.mark.parametrize(
    ("pull", "transport", "pulled"),
    [
        (PulledRoles.STATES, Transport.SHM, STATES),
        (PulledRoles.ALL, Transport.SHM, STATES | PAGED),
        (PulledRoles.ALL, Transport.TCP, STATES | PAGED),
    ],
)
async def test_what_is_pulled_gives_the_reference_tokens(
    tmp_path: Path, pull: PulledRoles, transport: Transport, pulled: set[Role]
) -> None:
    """P2/D1, three requests; `set` changes between them whether shards are read side by side, the events show both, no token changes."""
    async with ranks_mesh(tmp_path, transport=transport, transfer=Transfer.PULL, pull=pull) as world:
        mesh = world.mesh
        told: list[HandoffEvent] = []
        shard_events = f"{subjects.PREFIX}.ev.decode.*.{EventName.SHARD_PULLED}"
        await mesh.follow(shard_events, lambda data: told.append(decode(data, HandoffEvent)))
        for number, prompt in enumerate(PROMPTS):
            handoff, parallel = f"r{number}-0", number % 2 == 0
            change = SetWorker(key="parallel_shard_pull", value=str(int(parallel)))
            await mesh.ask("decode", "decode-0", WorkerVerb.SET, change, SettingChanged)
            _, finished = await world.compute(handoff, prompt)
            ended = await world.pull(handoff, finished.source)
            assert (ended.error, ended.parallel) == (None, parallel)
            assert {merge.role for merge in ended.merges} == STATES
            await world.all_moved(handoff)
            assert {role for role, *_ in world.moved(handoff, Transfer.PULL)} == pulled
            assert {role for role, *_ in world.moved(handoff, Transfer.PUSH)} == (STATES | PAGED) - pulled
            assert await world.tokens(handoff, finished) == list(prompt.output_ids[:NUM_TOKENS])
            await world.release(handoff)
        await mesh.clock.sleep(0.05)
    shards = [event for event in told if event.event is EventName.SHARD_PULLED]
    assert [(event.handoff_id, event.parallel) for event in shards] == [
        (f"r{number}-0", number % 2 == 0) for number in range(len(PROMPTS)) for _ in range(2)
    ]
    assert {event.shard_state for event in shards} == {"done"}


@pytest.mark.parametrize("transfer", [Transfer.PUSH, Transfer.PULL])
async def test_ranks_that_share_blocks_give_the_reference_tokens(tmp_path: Path, transfer: Transfer) -> None:
    """P2 to four ranks, two for each KV head: every byte is verified before the first step, though a short prompt leaves ranks without a key."""
    settings: dict[str, Any] = {"transfer": transfer, "pull": PulledRoles.ALL, "verify_cache": True}
    async with ranks_mesh(tmp_path, cut=(4, 2), **settings) as world:
        for number, prompt in enumerate((PROMPTS[0], PROMPTS[2])):
            handoff = f"r{number}-0"
            _, finished = await world.compute(handoff, prompt, verify=True)
            assert finished.digests
            if transfer is Transfer.PULL:
                assert (await world.pull(handoff, finished.source)).error is None
            await world.all_moved(handoff)
            assert await world.tokens(handoff, finished) == list(prompt.output_ids[:NUM_TOKENS])
            await world.release(handoff)


async def test_a_shard_that_fails_on_real_ranks_gives_everything_back(tmp_path: Path) -> None:
    """The read from source rank 1 fails: an end with the error, no merge, memory of both sides back at the releases."""
    async with ranks_mesh(tmp_path, failpoints="fail:source=1", transfer=Transfer.PULL) as world:
        _, finished = await world.compute("r0-0", PROMPTS[0])
        ended = await world.pull("r0-0", finished.source)
        assert ended.error is not None
        assert ended.error.code is ErrorCode.TRANSFER_FAILED
        assert ended.merges == ()
        await world.release("r0-0")


async def test_grants_to_read_that_are_not_good_any_more_are_refused_by_the_ranks(tmp_path: Path) -> None:
    """Older, of another owner, replayed after its release: the services cannot know, the source's own header refuses each.

    Over shared memory it is the reader that looks at the header, and therefore the reader that counts.
    """
    async with ranks_mesh(tmp_path, transfer=Transfer.PULL, pull=PulledRoles.ALL) as world:
        _, first = await world.compute("r0-0", PROMPTS[0])
        _, second = await world.compute("r1-0", PROMPTS[2])
        assert first.source is not None
        assert second.source is not None
        owner = {"generation": second.source.generation}
        forged = [
            _with(first.source, generation=first.source.generation - 1),
            _with(first.source, generation=first.source.generation + 100),
            _with(first.source, slot=second.source.slot),
            _with(first.source, slot=second.source.slot, **owner),
            _with(first.source, block_ids=_with_one_of(first.source.block_ids, second.source.block_ids[0])),
            _with(first.source, slot=SLOTS - 1),
        ]
        for lock, source in enumerate(forged, start=1):
            ended = await world.pull("r0-0", source, lock)
            assert ended.error is not None, source
            assert ended.error.code is ErrorCode.TRANSFER_FAILED
            assert ended.merges == ()
        assert (await world.pull("r0-0", first.source, 50)).error is None
        assert await world.tokens("r0-0", first) == list(PROMPTS[0].output_ids[:NUM_TOKENS])
        await world.mesh.release("prefill", "prefill-0", "r1-0")
        replayed = await world.pull("r1-0", second.source)
        assert replayed.error is not None
        assert replayed.error.code is ErrorCode.TRANSFER_FAILED
        refused = (len(forged) + 1) * 1.0
        assert world.counted("decode-0", "worker_pulls_total") == {("ok",): 1, (ErrorCode.TRANSFER_FAILED,): refused}
        assert world.counted("decode-0", "worker_shard_pulls_total") == {("done",): 2, ("failed",): 2 * refused}
        for handoff in ("r0-0", "r1-0"):
            await world.release(handoff)


async def test_a_grant_to_read_over_tcp_needs_its_secret(tmp_path: Path) -> None:
    """Whoever reaches the port and guesses everything else reads nothing; pulls with forged grants do not undo a sound link."""
    async with ranks_mesh(tmp_path, transport=Transport.TCP, transfer=Transfer.PULL) as world:
        _, finished = await world.compute("r0-0", PROMPTS[2])
        assert finished.source is not None
        decode_service = world.mesh.services["decode-0"]
        assert isinstance(decode_service, DecodeService)
        link = decode_service._sources._sources["prefill-0"]
        for lock in range(MAX_FAILED_IN_A_ROW):
            ended = await world.pull("r0-0", _with(finished.source, secret=("00" * 16, "")[lock % 2]), lock + 1)
            assert ended.error is not None
            assert (ended.error.code, "secret" in ended.error.message) == (ErrorCode.TRANSFER_FAILED, True)
        assert decode_service._sources._sources == {"prefill-0": link}
        assert link.is_linked
        failed = world.counted("decode-0", "worker_pulls_total")
        assert failed == {(ErrorCode.TRANSFER_FAILED,): MAX_FAILED_IN_A_ROW}
        await world.turned_away("prefill-0", (Asked.READ, RefusalReason.SECRET), at_least=MAX_FAILED_IN_A_ROW)
        assert (await world.pull("r0-0", finished.source, 9)).error is None
        assert await world.tokens("r0-0", finished) == list(PROMPTS[2].output_ids[:NUM_TOKENS])
        await world.release("r0-0")


@pytest.mark.parametrize("transport", list(Transport))
async def test_grants_to_write_that_are_not_good_are_refused_by_the_ranks(tmp_path: Path, transport: Transport) -> None:
    """Older, of another owner, replayed after its release, without its secret: prefill's pushes fail, and so does the handoff.

    The owner of the memory that they name is not touched: its answer is the reference's. Over tcp it counts whom it turned away.
    """
    async with ranks_mesh(tmp_path, transport=transport) as world:
        owner, finished = await world.compute("r9-0", PROMPTS[0])
        assert finished.error is None
        old, _ = await world.compute("r8-0", PROMPTS[2])
        await world.release("r8-0")
        own = owner.grant
        forged = [
            old.grant,
            _with(own, generation=own.generation - 1),
            _with(old.grant, block_ids=own.block_ids, slot=own.slot),
        ]
        if transport is Transport.TCP:
            forged += [_with(own, secret="00" * 16), _with(own, secret="")]
        for number, grant in enumerate(forged):
            handoff = f"r{number}-0"
            _, failed = await world.compute(handoff, PROMPTS[2], grant=grant)
            while failed.error is None:  # the first token may be there before the push is refused
                told = await world.mesh.heard.get()
                assert isinstance(told, PrefillFinished)
                failed = told
            assert failed.error.code is ErrorCode.TRANSFER_FAILED, grant
            await world.release(handoff)
            assert world.counted("prefill-0", "worker_pushes_total")["stale",] >= number + 1
        if transport is Transport.TCP:
            stale, secret = ((Asked.WRITE, reason) for reason in (RefusalReason.STALE, RefusalReason.SECRET))
            await world.turned_away("decode-0", stale, secret, at_least=2)
        else:
            assert world.counted("decode-0", "worker_transfers_refused_total") == {}
        assert await world.tokens("r9-0", finished) == list(PROMPTS[0].output_ids[:NUM_TOKENS])
        await world.release("r9-0")


def _with(grant: Grant, **changes: Any) -> Grant:
    return msgspec.structs.replace(grant, **changes)


def _with_one_of(own: tuple[int, ...], other: int) -> tuple[int, ...]:
    """Blocks of which the last belongs to somebody else."""
    return (*own[:-1], other)
