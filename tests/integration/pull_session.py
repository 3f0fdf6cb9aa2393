"""Sequences that a decode engine pulls from a prefill engine, step by step, with the bytes of both sides in view."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.engine.port import PullResult
from contracts.handoff import GRANT_SECRET_BYTES, Grant
from contracts.manifest import PagedPlace, RankManifest, Role
from contracts.rank import BindSequence, PullReport, PullShards, StepItem
from contracts.requests import SamplingParams
from tests.integration.cache_bytes import POISON, Gathered, Held, Memories, gather, poison, untouched
from tests.integration.handoff_pairs import CHUNK, NUM_BLOCKS, NUM_SLOTS, Worker

NUM_ROWS = 3
NUM_DECODED = 8
STATES = (Role.CONV, Role.SSM)
EVERYTHING = tuple(Role)
TIMEOUT_MS = 60_000


@dataclass(kw_only=True)
class Pulled:
    """One sequence, where each side keeps it, and what was reported of its pull."""

    seq: int
    prompt: tuple[int, ...]
    here: Held
    there: Held
    row: int
    source: Grant
    done: int = 0
    first_token: int | None = None
    reports: list[PullReport] = field(default_factory=list)


@dataclass(kw_only=True)
class PullSession:
    """Some pulls of `destination`, which must be linked with `source` as its source. Leave with `end`."""

    source: Worker
    destination: Worker
    memories: Memories
    pulled: list[Pulled] = field(default_factory=list)
    _free: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=lambda: list(range(NUM_ROWS)))

    def __post_init__(self) -> None:
        order = random.Random(3)
        for worker in (self.source, self.destination):
            blocks, slots = list(range(NUM_BLOCKS)), list(range(NUM_SLOTS))
            order.shuffle(blocks)
            order.shuffle(slots)
            self._free[worker.name] = (blocks, slots)
        poison(self.memories.of(self.destination.name))

    async def reserve(self, prompt: Sequence[int], num_cached_tokens: int = 0) -> Pulled:
        """Bind a prompt on both sides: at the destination with a staging row, at the source with the secret of a grant to read."""
        seq, length = len(self.pulled) + 1, len(prompt)
        own, slot = self.take(self.source, length + NUM_DECODED)
        ids, there = self.take(self.destination, length + NUM_DECODED)
        grant = Grant(
            worker_id=self.source.name,
            incarnation=self.source.ref.incarnation,
            generation=self.source.next_generation(),
            block_ids=own,
            slot=slot,
            secret=secrets.token_hex(GRANT_SECRET_BYTES),
        )
        made = Pulled(
            seq=seq,
            prompt=tuple(prompt),
            here=Held(block_ids=own, slot=slot, num_tokens=length, start=num_cached_tokens),
            there=Held(block_ids=ids, slot=there, num_tokens=length, start=num_cached_tokens),
            row=self._rows.pop(),
            source=grant,
        )
        common: dict[str, Any] = {
            "seq": seq,
            "handoff_id": f"h{seq}",
            "num_prompt_tokens": length,
            "sampling": SamplingParams(max_tokens=NUM_DECODED, seed=1, temperature=0.0, ignore_eos=True),
        }
        await self.destination.group.bind(
            BindSequence(
                block_ids=ids,
                slot=there,
                generation=self.destination.next_generation(),
                staging_row=made.row,
                secret=secrets.token_hex(GRANT_SECRET_BYTES),
                **common,
            )
        )
        await self.source.group.bind(
            BindSequence(block_ids=own, slot=slot, generation=grant.generation, secret=grant.secret, **common)
        )
        self.pulled.append(made)
        return made

    async def prefill(self, *batch: Pulled) -> None:
        """Compute some prompts side by side to their ends."""
        while unfinished := [each for each in batch if each.done < len(each.prompt)]:
            items = []
            for each in unfinished:
                piece = each.prompt[each.done : each.done + CHUNK]
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
            for each in unfinished:
                each.first_token = tokens.get(each.seq)

    async def pull(self, each: Pulled, lock: int = 1, **changes: Any) -> PullResult:
        """Let the destination read a sequence; by default everything, side by side."""
        values: dict[str, Any] = {
            "roles": EVERYTHING,
            "parallel": True,
            "timeout_ms": TIMEOUT_MS,
            "num_cached_tokens": each.there.start,
            "source": each.source,
        } | changes
        return await self.destination.group.pull(PullShards(seq=each.seq, lock=lock, **values), each.reports.append)

    async def decode(self, worker: Worker, each: Pulled, count: int) -> list[int]:
        """`count` tokens of a sequence at either side, after the one that prefill has chosen."""
        tokens: list[int] = []
        for position in range(count):
            given = (each.first_token,) if position == 0 and each.first_token is not None else ()
            item = StepItem(seq=each.seq, start=len(each.prompt) + position, num_tokens=1, token_ids=given, sample=True)
            tokens.append((await worker.run([item]))[each.seq])
        return tokens

    def sent(self, each: Pulled, roles: Sequence[Role] = EVERYTHING) -> Gathered:
        """What the source holds of a sequence, unsharded."""
        return _only(gather(_manifests(self.source), self.memories.of(self.source.name), each.here), roles)

    def received(self, each: Pulled, roles: Sequence[Role] = EVERYTHING) -> Gathered:
        """What the destination holds of it, unsharded."""
        return _only(gather(_manifests(self.destination), self.memories.of(self.destination.name), each.there), roles)

    def states(self, each: Pulled) -> bytes:
        """All bytes of a sequence's states at the destination."""
        return b"".join(data.tobytes() for data in self.received(each, STATES).values())

    def nothing_else_written(self) -> bool:
        """Whether all of the destination's memory but the sequences' own slots, tokens and staging rows is still poison."""
        manifests = _manifests(self.destination)
        memories = self.memories.of(self.destination.name)
        copies = [memoryview(bytearray(memory)) for memory in memories]
        for manifest, memory in zip(manifests, copies, strict=True):
            start, stride = staging_of(manifest)
            for each in self.pulled:
                row = np.frombuffer(memory, np.uint8)[start + each.row * stride :][:stride]
                row[:] = POISON
        return untouched(manifests, copies, [each.there for each in self.pulled])

    async def end(self) -> None:
        """Give all memory back on both sides."""
        seqs = tuple(each.seq for each in self.pulled)
        for worker in (self.source, self.destination):
            assert await worker.group.release(seqs, worker.next_generation(), 5000) == frozenset()

    def take(self, worker: Worker, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Blocks for some tokens, and a slot, that no other sequence has."""
        blocks, slots = self._free[worker.name]
        return tuple(blocks.pop() for _ in range(-(-num_tokens // worker.block_tokens))), slots.pop()


def staging_of(manifest: RankManifest) -> tuple[int, int]:
    """Where the staging rows of a rank begin, and how far they are apart: what lies behind the last cache."""
    end = 0
    for span in manifest.spans:
        place = span.place
        if isinstance(place, PagedPlace):
            end = max(end, place.offset + manifest.num_blocks * place.block_stride)
        else:
            first = min(other.place.offset for other in manifest.spans if _same_cache(span, other))
            end = max(end, first + manifest.num_slots * place.slot_stride)
    start = -(-end // 64) * 64
    return start, (manifest.region_bytes - start) // NUM_ROWS


def _same_cache(span: Any, other: Any) -> bool:
    return bool((span.key.role, span.key.layer) == (other.key.role, other.key.layer))


def _only(found: Gathered, roles: Sequence[Role]) -> Gathered:
    return {key: data for key, data in found.items() if key.role in roles}


def _manifests(worker: Worker) -> list[RankManifest]:
    return [rank.manifest for rank in worker.info.ranks]
