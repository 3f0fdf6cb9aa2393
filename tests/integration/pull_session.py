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
from contracts.rank import BindSequence
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import SamplingParams
from tests.integration.cache_bytes import POISON, Held, untouched
from tests.integration.engine_session import EngineSession, manifests_of
from tests.integration.handoff_pairs import NUM_BLOCKS, NUM_SLOTS, Worker

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
class PullSession(EngineSession):
    """Some pulls of `destination`, which must be linked with `source` as its source. Leave with `end`."""

    num_rows: int = NUM_ROWS
    """Staging rows of the destination."""
    num_decoded: int = NUM_DECODED
    """Tokens that are reserved behind each prompt."""
    pulled: list[Pulled] = field(default_factory=list)
    _free: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    _rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows = list(range(self.num_rows))
        order = random.Random(3)
        for worker in (self.source, self.destination):
            blocks, slots = list(range(NUM_BLOCKS)), list(range(NUM_SLOTS))
            order.shuffle(blocks)
            order.shuffle(slots)
            self._free[worker.name] = (blocks, slots)

    async def reserve(self, prompt: Sequence[int], num_cached_tokens: int = 0) -> Pulled:
        """Bind a prompt on both sides: at the destination with a staging row, at the source with the secret of a grant to read."""
        seq, length = len(self.pulled) + 1, len(prompt)
        own, slot = self.take(self.source, length + self.num_decoded)
        ids, there = self.take(self.destination, length + self.num_decoded)
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
            "sampling": SamplingParams(max_tokens=self.num_decoded, seed=1, temperature=0.0, ignore_eos=True),
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

    def states(self, each: Pulled) -> bytes:
        """All bytes of a sequence's states at the destination."""
        return b"".join(data.tobytes() for data in self.received(each, STATES).values())

    def nothing_else_written(self) -> bool:
        """Whether all of the destination's memory but the sequences' own slots, tokens and staging rows is still poison."""
        manifests = manifests_of(self.destination)
        memories = self.memories.of(self.destination.name)
        copies = [memoryview(bytearray(memory)) for memory in memories]
        for manifest, memory in zip(manifests, copies, strict=True):
            start, stride = staging_of(manifest, self.num_rows)
            for each in self.pulled:
                row = np.frombuffer(memory, np.uint8)[start + each.row * stride :][:stride]
                row[:] = POISON
        return untouched(manifests, copies, [each.there for each in self.pulled])

    async def end(self) -> None:
        """Give all memory back on both sides."""
        await self.release(self.pulled)

    def take(self, worker: Worker, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Blocks for some tokens, and a slot, that no other sequence has."""
        blocks, slots = self._free[worker.name]
        return tuple(blocks.pop() for _ in range(-(-num_tokens // worker.block_tokens))), slots.pop()


def staging_of(manifest: RankManifest, num_rows: int = NUM_ROWS) -> tuple[int, int]:
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
    return start, (manifest.region_bytes - start) // num_rows


def _same_cache(span: Any, other: Any) -> bool:
    return bool((span.key.role, span.key.layer) == (other.key.role, other.key.layer))
