"""Workers whose ranks share the blocks of a sequence, started when a test asks for them, and what a test does with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from contracts.rank import BindSequence, ExtendSequences, Extension, StepItem
from contracts.requests import SamplingParams
from tests.integration.byte_session import ByteSession
from tests.integration.cache_bytes import Memories
from tests.integration.handoff_pairs import BUDGET, NUM_BLOCKS, Worker, link, start_worker
from tests.integration.pull_session import NUM_DECODED, PullSession
from tests.integration.stored_reference import StoredPrompt, load_reference

WIDE = load_reference("wide")
BATCH = 8
"""Sequences side by side, each with a staging row where it is pulled."""
BY_LENGTH = {len(prompt.token_ids): prompt for prompt in WIDE.prompts}
Cut = tuple[int, int]
"""tp and dcp."""


class Begun(Protocol):
    """A sequence whose prompt has been computed, as both kinds of session keep it."""

    @property
    def seq(self) -> int:
        """Its number at the ranks."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its prompt."""

    @property
    def first_token(self) -> int | None:
        """What prefill has chosen."""


@dataclass(kw_only=True)
class World:
    """Workers of the wide checkpoint, by role and cut."""

    folder: Path
    sockets: Path
    memories: Memories = field(default_factory=Memories)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _linked: set[tuple[str, str, str]] = field(default_factory=set)

    async def worker(self, role: str, tp: int, dcp: int = 1) -> Worker:
        """The worker of a role and cut, started now if nobody has asked for it before."""
        name = f"{role}{tp}-{dcp}"
        if name not in self._workers:
            rows = BATCH if role == "d" else 0
            self._workers[name] = await start_worker(
                name, self.folder, self.sockets, tp, dcp=dcp, memories=self.memories, num_staging_rows=rows
            )
        return self._workers[name]

    async def pair(self, transfer: str, prefill: int, decode: Cut) -> tuple[Worker, Worker]:
        """A prefill and a decode worker, linked the way in which bytes are to be moved."""
        source, destination = await self.worker("p", prefill), await self.worker("d", *decode)
        link_name = (transfer, source.name, destination.name)
        if link_name not in self._linked:
            if transfer == "push":
                await link(source, destination)
            else:
                await destination.group.link_source(source.ref, source.describe())
            self._linked.add(link_name)
        return source, destination

    @asynccontextmanager
    async def push_session(self, prefill: int, decode: Cut) -> AsyncIterator[ByteSession]:
        """Handoffs that prefill pushes."""
        source, destination = await self.pair("push", prefill, decode)
        session = ByteSession(source=source, destination=destination, memories=self.memories)
        try:
            yield session
        finally:
            await session.end()

    @asynccontextmanager
    async def pull_session(
        self, prefill: int, decode: Cut, num_decoded: int = NUM_DECODED
    ) -> AsyncIterator[PullSession]:
        """Handoffs that decode pulls, with memory for so many tokens behind each prompt."""
        source, destination = await self.pair("pull", prefill, decode)
        session = PullSession(
            source=source,
            destination=destination,
            memories=self.memories,
            num_rows=BATCH,
            num_decoded=num_decoded,
        )
        try:
            yield session
        finally:
            await session.end()

    async def stop(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            await worker.group.stop()


async def decode_batch(worker: Worker, batch: Sequence[Begun], count: int) -> list[tuple[int, ...]]:
    """`count` tokens of each sequence, the first of which prefill has chosen, in steps of all of them."""
    outputs = [[each.first_token] for each in batch]
    for position in range(count - 1):
        items = []
        for each in batch:
            given = (each.first_token,) if position == 0 and each.first_token is not None else ()
            items.append(
                StepItem(seq=each.seq, start=len(each.prompt) + position, num_tokens=1, token_ids=given, sample=True)
            )
        tokens = await worker.run(items)
        for each, output in zip(batch, outputs, strict=True):
            output.append(tokens[each.seq])
    return [tuple(token for token in output if token is not None) for output in outputs]


async def generate(worker: Worker, prompts: Sequence[StoredPrompt], count: int, chunk: int) -> list[tuple[int, ...]]:
    """Prefill and decode at one worker, `count` tokens of each prompt: chunks share steps with decodes where the budget allows it.

    A sequence gets blocks for its prompt, and more of them, one by one, as it grows.
    """
    await _bind(worker, prompts, count)
    blocks = [-(-len(prompt.token_ids) // worker.block_tokens) for prompt in prompts]
    done = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(len(output) < count for output in outputs):
        items: list[StepItem] = []
        added: list[Extension] = []
        budget = BUDGET
        for seq, prompt in enumerate(prompts):
            piece = prompt.token_ids[done[seq] : done[seq] + chunk]
            size = max(1, len(piece))
            if len(outputs[seq]) == count or size > budget:
                continue
            last = done[seq] + size >= len(prompt.token_ids)
            items.append(
                StepItem(
                    seq=seq,
                    start=done[seq],
                    num_tokens=size,
                    token_ids=piece,
                    sample=last,
                    last_chunk=last and bool(piece),
                )
            )
            done[seq] += size
            budget -= size
            if done[seq] > blocks[seq] * worker.block_tokens:
                added.append(Extension(seq=seq, block_ids=(NUM_BLOCKS - 1 - len(prompts) * blocks[seq] - seq,)))
                blocks[seq] += 1
        if added:
            command = ExtendSequences(generation=worker.next_generation(), extensions=tuple(added))
            await worker.group.extend(command)
        for seq, token in (await worker.run(items)).items():
            outputs[seq].append(token)
    assert await worker.group.release(tuple(range(len(prompts))), worker.next_generation(), 5000) == frozenset()
    return [tuple(output) for output in outputs]


async def _bind(worker: Worker, prompts: Sequence[StoredPrompt], count: int) -> None:
    first = 0
    for seq, prompt in enumerate(prompts):
        num_blocks = -(-len(prompt.token_ids) // worker.block_tokens)
        await worker.group.bind(
            BindSequence(
                seq=seq,
                handoff_id=f"h{seq}",
                generation=worker.next_generation(),
                block_ids=tuple(range(first, first + num_blocks)),
                slot=seq,
                num_prompt_tokens=len(prompt.token_ids),
                sampling=SamplingParams(max_tokens=count, seed=1, temperature=0.0, ignore_eos=True),
            )
        )
        first += num_blocks
