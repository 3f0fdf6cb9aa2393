"""A sequence whose numbers went bad ends alone: its neighbours in the step, and who has its memory next, never know of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from common.engine.port import StepResult
from common.engine.ranks.group import RankGroup
from contracts.manifest import Role
from contracts.rank import DrafterKind, StepItem, StepPlan
from tests.integration.cache_bytes import Held, Memories, spoil
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.speculation_session import FOLDER, prompts

SOUND, BAD = 0, 1
NUM_TOKENS = 24


class Pair:
    """Two sequences that always share a step."""

    def __init__(self, group: RankGroup, depth: int) -> None:
        self.group = group
        self.texts = dict(zip((SOUND, BAD), prompts()[1:3], strict=True))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self._depth = depth
        self._step = 0
        self._generation = 0

    async def prefill(self, *seqs: int) -> None:
        """Compute whole prompts in one step."""
        for seq in seqs:
            self._generation += 1
            self.tokens[seq].clear()
            await self.group.bind(binding(seq, len(self.texts[seq]), generation=self._generation))
        await self._run(
            StepItem(seq=seq, start=0, num_tokens=len(text), token_ids=text, sample=True, last_chunk=True)
            for seq, text in self.texts.items()
            if seq in seqs
        )

    async def decode(self, *seqs: int) -> StepResult:
        """One more step, with guesses."""
        return await self._run(
            StepItem(
                seq=seq,
                start=len(self.texts[seq]) + len(self.tokens[seq]) - 1,
                num_tokens=1 + self._depth,
                sample=True,
            )
            for seq in seqs
        )

    async def generate(self) -> list[list[int]]:
        """Decode both until each has enough tokens."""
        while any(len(self.tokens[seq]) < NUM_TOKENS for seq in (SOUND, BAD)):
            assert (await self.decode(SOUND, BAD)).failed == ()
        return [self.tokens[seq][:NUM_TOKENS] for seq in (SOUND, BAD)]

    async def release(self, *seqs: int) -> None:
        """Give memory back."""
        self._generation += 1
        assert await self.group.release(seqs, self._generation, 1000) == frozenset()

    async def _run(self, items: Iterable[StepItem]) -> StepResult:
        self._step += 1
        result = await self.group.step(StepPlan(step=self._step, items=tuple(items)))
        for token in result.tokens:
            self.tokens[token.seq].append(token.token_id)
        return result


@pytest.mark.parametrize(
    ("role", "tp", "dcp", "depth"),
    [(Role.SSM, 1, 1, 0), (Role.SSM, 2, 1, 3), (Role.KEY, 2, 1, 0), (Role.KEY, 4, 2, 3)],
)
async def test_bad_logits_end_their_own_sequence_alone(
    tmp_path: Path, role: Role, tp: int, dcp: int, depth: int
) -> None:
    """All ranks name it and give it no token; its neighbour's are as ever, and so are those of the next who has its slot and blocks."""
    memories = Memories()
    drafter = DrafterKind.MTP if depth else DrafterKind.NONE
    messages = starts(FOLDER, tmp_path, tp, dcp=dcp, drafter=drafter, num_speculative_tokens=depth)
    async with engine(messages, thread_launcher(tp, watch=memories.watch)) as (group, info):
        pair = Pair(group, depth)
        await pair.prefill(SOUND, BAD)
        calm = await pair.generate()
        await pair.release(SOUND, BAD)

        await pair.prefill(SOUND, BAD)
        assert (await pair.decode(SOUND, BAD)).failed == ()
        bound = binding(BAD, 1)
        held = Held(block_ids=bound.block_ids, slot=bound.slot, num_tokens=len(pair.texts[BAD]))
        spoil(info.ranks[tp - 1].manifest, memories.of("w1")[tp - 1], held, role)
        told = list(pair.tokens[BAD])
        assert (await pair.decode(SOUND, BAD)).failed == (BAD,)
        assert pair.tokens[BAD] == told
        await pair.decode(SOUND)
        await pair.release(BAD)

        await pair.prefill(BAD)
        assert await pair.generate() == calm
