"""Drafts across a handoff: what the draft head keeps arrives byte for byte, and decode guesses as if it had computed the prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from common.engine.drafts.handoff import DraftHandoff
from common.engine.model.config import load_config
from common.engine.model.shard import RankShard
from common.engine.model.weights import load_mtp_weights, load_weights, num_weight_bytes
from common.engine.port import EngineError
from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from common.layout.run_batch import Placed
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, DrafterKind, StepItem, StepPlan
from tests.integration.byte_session import ByteSession, Travelling
from tests.integration.cache_bytes import Memories, differing, spoil
from tests.integration.guessed_batches import TEXT, Steps, accepted, decode_all, generate_all, tokens_of
from tests.integration.handoff_pairs import BLOCK_SIZE, Worker, link, start_worker

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
DEPTH = 3
NUM_TOKENS = 25
ROOM = NUM_TOKENS + 2 * DEPTH + 2
STATES = (Role.CONV, Role.SSM)
DECODE: dict[str, Any] = {"num_speculative_tokens": DEPTH, "num_staging_rows": 8}
WORKERS: dict[str, dict[str, Any]] = {
    "mixed": {"tp": 1, "num_speculative_tokens": DEPTH},
    "plain": {"tp": 2, "drafter": DrafterKind.NONE},
    "p1": {"tp": 1},
    "p2": {"tp": 2},
    "p2-whole": {"tp": 2, "mtp_draft_body_tp1": True},
    "d1": {"tp": 1, **DECODE},
    "d2": {"tp": 2, **DECODE},
    "d2-whole": {"tp": 2, **DECODE, "num_speculative_tokens": 1, "mtp_draft_body_tp1": True},
    "d4-dcp2": {"tp": 4, "dcp": 2, **DECODE},
}
PAIRS = (("p2", "d1"), ("p1", "d2"), ("p2", "d4-dcp2"))
BYTE_PAIRS = (*PAIRS, ("p2-whole", "d1"), ("p1", "d2-whole"), ("p2-whole", "d4-dcp2"))
WAYS: list[tuple[str, str, tuple[Role, ...]]] = [(*pair, ()) for pair in BYTE_PAIRS]
WAYS += [("p2-whole", "d1", tuple(Role)), ("p2", "d4-dcp2", STATES)]
LENGTHS = (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 90, 300)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def prompts() -> tuple[tuple[int, ...], ...]:
    """The text from its beginning, as often as is needed: a draft head guesses better what has been said before."""
    token_ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(3 * TEXT).ids
    return tuple(tuple(token_ids[:size]) for size in LENGTHS)


PROMPTS = prompts()


@dataclass(frozen=True, kw_only=True)
class World:
    """Workers that keep a draft head, and what one that computes the prompts itself generates."""

    workers: dict[str, Worker]
    memories: Memories
    mixed: list[Steps]

    @asynccontextmanager
    async def session(self, source: str, destination: str) -> AsyncIterator[ByteSession]:
        """Handoffs between two of them."""
        session = ByteSession(
            source=self.workers[source],
            destination=self.workers[destination],
            memories=self.memories,
            num_decoded=ROOM,
        )
        try:
            yield session
        finally:
            await session.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The shipped checkpoint on workers of many cuts, each prefill worker linked with its decode workers both ways."""
    torch.set_num_threads(1)
    sockets = tmp_path_factory.mktemp("s")
    memories = Memories()
    workers: dict[str, Worker] = {}
    try:
        for name, how in WORKERS.items():
            all_of_it = {"drafter": DrafterKind.MTP, **how}
            workers[name] = await start_worker(name, FOLDER, sockets, memories=memories, **all_of_it)
        for source, destination in BYTE_PAIRS:
            here, there = workers[source], workers[destination]
            await link(here, there)
            await there.group.link_source(here.ref, here.describe())
        mixed = await generate_all(None, workers["mixed"], PROMPTS, DEPTH, NUM_TOKENS)
        yield World(workers=workers, memories=memories, mixed=mixed)
    finally:
        for worker in workers.values():
            await worker.group.stop()


async def _handed_over(session: ByteSession, pulled: tuple[Role, ...] = ()) -> list[Travelling]:
    """All prompts, one after the other; their caches have arrived."""
    found = []
    for prompt in PROMPTS:
        each = await session.reserve(prompt, pulled=pulled)
        await session.prefill(each)
        await session.arrived(each)
        if pulled:
            await session.pull(each)
        found.append(each)
    return found


async def _taken_over(
    session: ByteSession, there: Iterable[Travelling], *, depth: int = DEPTH, **how: Any
) -> list[Steps]:
    """What the destination makes of what has arrived."""
    begun = []
    for each in there:
        assert each.first_token is not None
        how = {"num_tokens": 1 + depth, "bootstrap": True, **how}
        item = StepItem(seq=each.seq, start=len(each.prompt), token_ids=(each.first_token,), sample=True, **how)
        begun.append((item, each.first_token))
    return await decode_all(session.destination, begun, NUM_TOKENS)


@pytest.mark.parametrize(("source", "destination", "pulled"), WAYS)
async def test_the_draft_s_cache_arrives_byte_for_byte(
    world: World, source: str, destination: str, pulled: tuple[Role, ...]
) -> None:
    """Prompts of one and two tokens, of a block and one more, and of three chunks, into poisoned memory; nothing else is written."""
    async with world.session(source, destination) as session:
        there = await _handed_over(session, pulled)
        for each in there:
            received = session.received(each)
            assert differing(received, session.sent(each)) == []
            drafts = {key.role: data for key, data in received.items() if key.namespace is Namespace.DRAFT}
            assert set(drafts) == {Role.KEY, Role.VALUE, Role.BOOTSTRAP}
            assert drafts[Role.KEY].shape[1] == len(each.prompt) - 1
            assert drafts[Role.BOOTSTRAP].view(np.float32).any()
        bootstraps = [session.received(each, (Role.BOOTSTRAP,)).popitem()[1].tobytes() for each in there]
        assert len(set(bootstraps)) == len(there)
        if not pulled:
            assert session.nothing_else_written()


@pytest.mark.parametrize(
    ("source", "destination", "pulled"), [("p2", "d1", ()), ("p1", "d2", ()), ("p2", "d4-dcp2", tuple(Role))]
)
async def test_decode_guesses_as_if_it_had_computed_the_prompt(
    world: World, source: str, destination: str, pulled: tuple[Role, ...]
) -> None:
    """The tokens of a mixed worker, in the same steps: from the first one on, as many guesses are right."""
    async with world.session(source, destination) as session:
        found = await _taken_over(session, await _handed_over(session, pulled))
    assert accepted(found) == accepted(world.mixed)
    assert found == world.mixed
    assert any(counts[0] for counts in accepted(found))
    assert sum(map(sum, accepted(found))) > 2 * (NUM_TOKENS - 1)


async def test_a_decode_worker_may_guess_less_than_another(world: World) -> None:
    """One that guesses a token at a time goes on from the same cache: the same tokens, one or two a step."""
    async with world.session("p1", "d2-whole") as session:
        found = await _taken_over(session, await _handed_over(session), depth=1)
    assert tokens_of(found, NUM_TOKENS) == tokens_of(world.mixed, NUM_TOKENS)
    assert {count for counts in accepted(found) for count in counts} == {0, 1}


async def test_without_its_draft_s_cache_a_sequence_gets_no_guesses(world: World) -> None:
    """Nothing says that the draft's cache has come: the same tokens, one a step, though each step asks for guesses."""
    async with world.session("p2", "d1") as session:
        there = (await _handed_over(session))[-2:]
        items = [
            StepItem(
                seq=each.seq, start=len(each.prompt), num_tokens=1, token_ids=(each.first_token or 0,), sample=True
            )
            for each in there
        ]
        second = await session.destination.run(items)
        behind = [StepItem(seq=item.seq, start=item.start + 1, num_tokens=1 + DEPTH, sample=True) for item in items]
        begun = [(item, second[item.seq]) for item in behind]
        found = await decode_all(session.destination, begun, NUM_TOKENS)
    assert {count for counts in accepted(found) for count in counts} == {0}
    wanted = tokens_of(world.mixed, NUM_TOKENS)[-2:]
    for each, steps, tokens in zip(there, found, wanted, strict=True):
        assert [each.first_token, *(token for (token,) in steps)][: len(tokens)] == tokens


async def test_a_prompt_whose_numbers_go_bad_is_given_no_token_and_harms_nobody(world: World) -> None:
    """Neither who shares its step, nor who has its memory next: what was pushed of it, drafts too, is theirs to write over."""
    async with world.session("p2", "d1") as session:
        source = session.source
        bad, sound = [await session.reserve(prompt) for prompt in (PROMPTS[-1], PROMPTS[-2])]
        await session.prefill_step(bad)
        spoil(source.info.ranks[1].manifest, session.memories.of(source.name)[1], bad.here, Role.SSM)
        await session.prefill_step(bad, sound)
        await session.prefill_step(bad)
        assert (bad.done, bad.first_token, sound.done) == (len(bad.prompt), None, len(sound.prompt))
        await session.arrived(bad, sound)
        await session.forget_at_source(bad)
        again = await session.reserve(PROMPTS[-1])
        assert again.here.slot == bad.here.slot
        await session.prefill(again)
        await session.arrived(again)
        found = await _taken_over(session, [sound, again])
    assert found == world.mixed[-2:]


async def test_the_draft_head_counts_among_the_weights(world: World) -> None:
    """A rank says what it holds: its part of the head, or all of its layer."""

    def weight_bytes(name: str) -> int:
        return world.workers[name].info.ranks[0].num_weight_bytes

    shard = RankShard(config=load_config(FOLDER), tp_rank=0, tp_size=2)
    with_head = num_weight_bytes(
        load_weights(FOLDER, shard, torch.float32), load_mtp_weights(FOLDER, shard, torch.float32)
    )
    assert weight_bytes("plain") < weight_bytes("p2") == with_head < weight_bytes("p2-whole")


@pytest.mark.parametrize(
    ("worker", "changes", "rule"),
    [
        ("d2", {"token_ids": (5, 6)}, "one token id behind a prompt"),
        ("d2", {"num_tokens": DEPTH + 2}, f"1 to {DEPTH + 1} tokens"),
        ("d2", {"token_ids": (1 << 20,)}, "token_ids: 1048576 is not allowed"),
        ("d2", {"seq": 99}, "a bound sequence"),
        ("plain", {}, "no draft's cache is kept here"),
    ],
    ids=["two tokens", "too many guesses", "no token", "nobody's", "no draft"],
)
async def test_what_cannot_be_gone_on_from_is_refused_by_all_ranks(
    world: World, worker: str, changes: dict[str, Any], rule: str
) -> None:
    """Before anybody guesses: all say the same, and the engine goes on."""
    values: dict[str, Any] = {"seq": 1, "start": 1, "num_tokens": 2, "token_ids": (5,), "sample": True}
    item = StepItem(**(values | {"bootstrap": True} | changes))
    async with world.session("p1", "d2") as session:
        await session.reserve(PROMPTS[0])
        with pytest.raises(EngineError, match=rule):
            await world.workers[worker].group.step(StepPlan(step=1, items=(item,)))
        assert len(await world.workers[worker].group.scan()) == WORKERS[worker]["tp"]


async def test_the_bootstrap_of_another_slot_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: the tokens stay right, and other guesses are."""
    take = DraftHandoff.take

    def of_another(self: DraftHandoff, binding: BindSequence, item: StepItem) -> Any:
        others = [slot for slot, state in enumerate(self._bootstrap) if state.any() and slot != binding.slot]
        self._bootstrap[binding.slot] = self._bootstrap[others[0]]
        return take(self, binding, item)

    monkeypatch.setattr(DraftHandoff, "take", of_another)
    async with world.session("p1", "d2") as session:
        found = await _taken_over(session, await _handed_over(session))
    assert accepted(found) != accepted(world.mixed)
    assert tokens_of(found, NUM_TOKENS) == tokens_of(world.mixed, NUM_TOKENS)


async def test_a_draft_s_cache_that_is_shifted_by_one_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: each pair arrives one place too late; the tokens stay right, and other guesses are."""
    place_tokens = PartCopies.place_tokens

    def shifted(self: PartCopies, chunk: TokenChunk) -> list[Placed]:
        found = place_tokens(self, chunk)
        if self.part.namespace is not Namespace.DRAFT:
            return found
        by = self._places[0][0].token_bytes
        return [Placed(each.pattern, each.local_base - by, each.remote_base) for each in found]

    monkeypatch.setattr(PartCopies, "place_tokens", shifted)
    async with world.session("p1", "d2") as session:
        found = await _taken_over(session, await _handed_over(session))
    assert accepted(found) != accepted(world.mixed)
    assert tokens_of(found, NUM_TOKENS) == tokens_of(world.mixed, NUM_TOKENS)
