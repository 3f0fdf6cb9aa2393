"""Sequences on their way from one engine to another, step by step, with the bytes of both sides in view."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.layout.ranges import RangeSet
from contracts.handoff import GRANT_SECRET_BYTES, Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, PushOutcome, PushTarget
from contracts.rank_pull import PullShards
from contracts.requests import SamplingParams
from tests.integration.cache_bytes import Gathered, Held, untouched
from tests.integration.engine_session import EngineSession, decode_at, manifests_of
from tests.integration.handoff_pairs import DEADLINE_S, NUM_BLOCKS, NUM_SLOTS, PartKey, Worker, owed_by

NUM_DECODED = 8
"""Tokens that are reserved behind each prompt."""
SLOTS = frozenset((Role.CONV, Role.SSM))


@dataclass(kw_only=True)
class Travelling:
    """One sequence, and where each side keeps it."""

    seq: int
    prompt: tuple[int, ...]
    here: Held
    there: Held
    grant: Grant
    done: int = 0
    num_decoded: int = 0
    first_token: int | None = None
    source: Grant | None = None
    pulled: tuple[Role, ...] = ()

    @property
    def handoff_id(self) -> str:
        """The handoff's name."""
        return f"h{self.seq}"


@dataclass(kw_only=True)
class _Free:
    """Blocks and slots of one side in an order that only looks like none."""

    blocks: list[int]
    slots: list[int]
    block_tokens: int

    @classmethod
    def shuffled(cls, worker: Worker, seed: int) -> _Free:
        """All of a worker's memory."""
        free = cls(blocks=list(range(NUM_BLOCKS)), slots=list(range(NUM_SLOTS)), block_tokens=worker.block_tokens)
        order = random.Random(seed)
        order.shuffle(free.blocks)
        order.shuffle(free.slots)
        return free

    def take(self, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> tuple[tuple[int, ...], Held]:
        """Blocks for `num_tokens` tokens, and what of them the prompt fills."""
        ids = tuple(self.blocks.pop() for _ in range(-(-num_tokens // self.block_tokens)))
        return ids, Held(block_ids=ids, slot=self.slots.pop(), num_tokens=num_prompt_tokens, start=num_cached_tokens)


@dataclass(kw_only=True)
class ByteSession(EngineSession):
    """Some handoffs from `source` to `destination`, which must be linked: both ways where something is pulled. Leave with `end`."""

    num_decoded: int = NUM_DECODED
    """Tokens that are reserved behind each prompt."""
    _travelling: list[Travelling] = field(default_factory=list)
    _done: dict[tuple[str, PartKey], RangeSet] = field(default_factory=dict)
    _here: _Free = field(init=False)
    _there: _Free = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._here, self._there = _Free.shuffled(self.source, 1), _Free.shuffled(self.destination, 2)

    async def reserve(
        self, prompt: Sequence[int], num_cached_tokens: int = 0, *, pulled: tuple[Role, ...] = ()
    ) -> Travelling:
        """Set memory aside for a prompt on both sides; the destination's caches are poison until something is pushed.

        Of the first `num_cached_tokens` tokens the destination says that it has them; they are left out of what is compared. Roles
        in `pulled` are left to `pull`.
        """
        seq = len(self._travelling) + 1
        length = len(prompt)
        ids, there = self._there.take(length + self.num_decoded, length, num_cached_tokens)
        own, here = self._here.take(length, length, num_cached_tokens)
        worker = self.destination
        grant = Grant(
            worker_id=worker.name,
            incarnation=worker.ref.incarnation,
            generation=worker.next_generation(),
            block_ids=ids,
            slot=there.slot,
        )
        source = Grant(
            worker_id=self.source.name,
            incarnation=self.source.ref.incarnation,
            generation=self.source.next_generation(),
            block_ids=own,
            slot=here.slot,
            secret=secrets.token_hex(GRANT_SECRET_BYTES) if pulled else "",
        )
        made = Travelling(
            seq=seq, prompt=tuple(prompt), here=here, there=there, grant=grant, source=source, pulled=pulled
        )
        push_target = PushTarget(grant=grant, num_cached_tokens=num_cached_tokens, pulled=pulled)
        sampling = SamplingParams(max_tokens=self.num_decoded, seed=1, temperature=0.0, ignore_eos=True)
        for side, block_ids, slot, generation, push in (
            (worker, ids, there.slot, grant.generation, None),
            (self.source, own, here.slot, source.generation, push_target),
        ):
            await side.group.bind(
                BindSequence(
                    seq=seq,
                    handoff_id=made.handoff_id,
                    generation=generation,
                    block_ids=block_ids,
                    slot=slot,
                    num_prompt_tokens=length,
                    sampling=sampling,
                    push=push,
                    secret="" if push is None else source.secret,
                    staging_row=seq - 1 if pulled and push is None else None,
                )
            )
        self._travelling.append(made)
        return made

    async def arrived(self, *wanted: Travelling) -> None:
        """Wait until everything of these sequences has been reported, each token once."""
        planned = self.source.plans[self.destination.name].parts
        owed: dict[tuple[str, PartKey], RangeSet] = {}
        for each in wanted:
            for part in (part for part in planned if part.role not in each.pulled):
                key = (part.namespace, part.role, part.layer, part.src_rank, part.dst_rank)
                owed[each.handoff_id, key] = owed_by(part, each.here.start, len(each.prompt))
        async with asyncio.timeout(DEADLINE_S):
            while any(self._done.get(key, RangeSet()) != everything for key, everything in owed.items()):
                push = await self.source.group.next_push()
                assert push.outcome is PushOutcome.DONE, push.reason
                part_key = (push.namespace, push.role, push.layer, push.rank, push.destination_rank)
                held = self._done.get((push.handoff_id, part_key), RangeSet())
                assert not held.overlaps(push.start, push.end)
                self._done[push.handoff_id, part_key] = held.add(push.start, push.end)

    async def pull(self, each: Travelling) -> None:
        """Let the destination read what is not pushed of a sequence whose prompt is computed."""
        assert each.source is not None
        command = PullShards(
            seq=each.seq,
            lock=1,
            source=each.source,
            roles=each.pulled,
            num_cached_tokens=each.there.start,
            parallel=True,
            timeout_ms=60_000,
        )
        result = await self.destination.group.pull(command, lambda _: None)
        assert result.error is None, result.error

    async def decode(self, each: Travelling, count: int) -> tuple[int, ...]:
        """Take a sequence over: `count` tokens after the one that prefill has chosen."""
        tokens = await decode_at(self.destination, each, count)
        each.num_decoded += count
        return tuple(tokens)

    def nothing_else_written(self) -> bool:
        """Whether all of the destination's memory but the granted slots, and the tokens that there are, is still poison."""
        helds = [replace(each.there, num_tokens=len(each.prompt) + each.num_decoded) for each in self._travelling]
        return untouched(manifests_of(self.destination), self.memories.of(self.destination.name), helds)

    async def forget_at_source(self, each: Travelling) -> None:
        """Release the source's memory of a sequence that has been taken over: the next one gets that very memory."""
        generation = self.source.next_generation()
        assert await self.source.group.release((each.seq,), generation, 5000) == frozenset()
        self._here.blocks += reversed(each.here.block_ids)
        self._here.slots.append(each.here.slot)

    async def end(self) -> None:
        """Give all memory back on both sides."""
        await self.release(self._travelling)


def paged(found: Gathered) -> Gathered:
    """Keys and values alone: what decoding adds to, and never changes."""
    return {key: data for key, data in found.items() if key.role not in SLOTS}


def layers_of(found: Gathered) -> dict[Role, set[int]]:
    """Which layers of the target are there, by role."""
    layers: dict[Role, set[int]] = {}
    for key in found:
        assert key.namespace is Namespace.TARGET
        layers.setdefault(key.role, set()).add(key.layer)
    return layers
