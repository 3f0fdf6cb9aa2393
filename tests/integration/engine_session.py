"""Sequences that two engines share, step by step: what sessions that push and sessions that pull have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.manifest import RankManifest, Role
from contracts.rank import StepItem
from tests.integration.cache_bytes import Gathered, Held, Memories, gather, poison
from tests.integration.handoff_pairs import CHUNK, Worker


class Prompted(Protocol):
    """A sequence whose prompt is computed at the source. `done` counts the tokens that have been."""

    seq: int
    prompt: tuple[int, ...]
    here: Held
    there: Held
    done: int
    first_token: int | None


@dataclass(kw_only=True)
class EngineSession:
    """`source` computes prompts, `destination`, whose caches are poison at first, goes on; the two must be linked."""

    source: Worker
    destination: Worker
    memories: Memories
    chunk: int = CHUNK
    """Most tokens of a prompt in one step."""

    def __post_init__(self) -> None:
        poison(self.memories.of(self.destination.name))

    async def prefill_step(self, *batch: Prompted) -> None:
        """Compute the next chunk of each sequence in one step."""
        items = []
        for each in batch:
            piece = each.prompt[each.done : each.done + self.chunk]
            last = each.done + len(piece) == len(each.prompt)
            items.append(
                StepItem(
                    seq=each.seq,
                    start=each.done,
                    num_tokens=len(piece),
                    token_ids=piece,
                    sample=last,
                    last_chunk=last,
                )
            )
            each.done += len(piece)
        tokens = await self.source.run(items)
        for each in batch:
            each.first_token = tokens.get(each.seq)

    async def prefill(self, *batch: Prompted) -> None:
        """Compute some prompts side by side to their ends."""
        while unfinished := [each for each in batch if each.done < len(each.prompt)]:
            await self.prefill_step(*unfinished)

    def sent(self, each: Prompted, roles: Sequence[Role] = tuple(Role)) -> Gathered:
        """What the source holds of a sequence, unsharded."""
        return self._held(self.source, each.here, roles)

    def received(self, each: Prompted, roles: Sequence[Role] = tuple(Role)) -> Gathered:
        """What the destination holds of it, unsharded."""
        return self._held(self.destination, each.there, roles)

    def _held(self, worker: Worker, held: Held, roles: Sequence[Role]) -> Gathered:
        found = gather(manifests_of(worker), self.memories.of(worker.name), held)
        return {key: data for key, data in found.items() if key.role in roles}

    async def release(self, sequences: Iterable[Prompted]) -> None:
        """Give all memory of sequences back on both sides."""
        seqs = tuple(each.seq for each in sequences)
        for worker in (self.source, self.destination):
            assert await worker.group.release(seqs, worker.next_generation(), 5000) == frozenset()


async def decode_at(worker: Worker, each: Prompted, count: int) -> list[int]:
    """`count` tokens of a sequence at one side, after the one that prefill has chosen."""
    tokens: list[int] = []
    for position in range(count):
        given = (each.first_token,) if position == 0 and each.first_token is not None else ()
        item = StepItem(seq=each.seq, start=len(each.prompt) + position, num_tokens=1, token_ids=given, sample=True)
        tokens.append((await worker.run([item]))[each.seq])
    return tokens


def manifests_of(worker: Worker) -> Sequence[RankManifest]:
    """What a worker's ranks say of their memory."""
    return [rank.manifest for rank in worker.info.ranks]
