"""Batches of requests on engines that guess, with or without a handoff before: what each step gave to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contracts.handoff import Grant
from contracts.rank import BindSequence, PushTarget, StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.handoff_pairs import NUM_SLOTS, Worker, ledger_closed, memory_for, prefill_steps

Steps = list[tuple[int, ...]]
"""What a request got: its first token, then what each step gave it, a token and as many guesses as were right."""
DEADLINE_MS = 5000


async def generate_all(
    source: Worker | None, destination: Worker, prompts: Sequence[tuple[int, ...]], depth: int, num_tokens: int
) -> list[Steps]:
    """As many tokens of each prompt, or some more, in batches as large as there are slots; `depth` guesses are asked for.

    Prompts are computed at `source` and handed over, or, without one, by the worker that goes on with them.
    """
    found: list[Steps] = []
    for begin in range(0, len(prompts), NUM_SLOTS):
        batch = prompts[begin : begin + NUM_SLOTS]
        room = num_tokens + depth + 1
        if source is None:
            items = await _computed(destination, batch, room, depth)
        else:
            items = await _handed_over(source, destination, batch, room, depth)
        found += await _decoded(destination, items, num_tokens)
        for worker in (destination,) if source is None else (source, destination):
            seqs = tuple(range(1, len(batch) + 1))
            assert await worker.group.release(seqs, worker.next_generation(), DEADLINE_MS) == frozenset()
    return found


def tokens_of(found: Sequence[Steps], num_tokens: int) -> list[list[int]]:
    """The first tokens of each request, whichever steps they came with."""
    return [[token for step in steps for token in step][:num_tokens] for steps in found]


def accepted(found: Sequence[Steps]) -> list[list[int]]:
    """How many guesses were right in each step of each request."""
    return [[len(step) - 1 for step in steps[1:]] for steps in found]


async def _computed(
    worker: Worker, prompts: Sequence[tuple[int, ...]], room: int, depth: int
) -> list[tuple[StepItem, int]]:
    for binding in _bindings(worker, prompts, room):
        await worker.group.bind(binding)
    first: dict[int, int] = {}
    for items in prefill_steps(prompts):
        first |= await worker.run(items)
    return [
        (StepItem(seq=seq, start=len(prompt), num_tokens=1 + depth, sample=True), first[seq])
        for seq, prompt in enumerate(prompts, 1)
    ]


async def _handed_over(
    source: Worker, destination: Worker, prompts: Sequence[tuple[int, ...]], room: int, depth: int
) -> list[tuple[StepItem, int]]:
    grants = memory_for(prompts, destination, room, spread=3)
    for binding in _bindings(destination, prompts, room, grants=grants):
        await destination.group.bind(binding)
    for binding in _bindings(source, prompts, 0, push_to=grants):
        await source.group.bind(binding)
    first: dict[int, int] = {}
    for items in prefill_steps(prompts):
        first |= await source.run(items)
    await ledger_closed(source, destination, prompts)
    found = []
    for seq, prompt in enumerate(prompts, 1):
        item = StepItem(
            seq=seq,
            start=len(prompt),
            num_tokens=1 + depth,
            token_ids=(first[seq],),
            sample=True,
            bootstrap=True,
        )
        found.append((item, first[seq]))
    return found


def _bindings(
    worker: Worker,
    prompts: Sequence[tuple[int, ...]],
    extra: int,
    *,
    grants: Sequence[Grant] = (),
    push_to: Sequence[Grant] = (),
) -> Iterator[BindSequence]:
    sampling = SamplingParams(max_tokens=max(1, extra), seed=1, temperature=0.0, ignore_eos=True)
    grants = grants or memory_for(prompts, worker, extra, spread=1)
    for seq, (prompt, grant) in enumerate(zip(prompts, grants, strict=True), 1):
        yield BindSequence(
            seq=seq,
            handoff_id=f"h{seq}",
            generation=grant.generation,
            block_ids=grant.block_ids,
            slot=grant.slot,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            secret="" if push_to else grant.secret,
            push=PushTarget(grant=push_to[seq - 1], num_cached_tokens=0) if push_to else None,
        )


async def _decoded(worker: Worker, begun: Sequence[tuple[StepItem, int]], num_tokens: int) -> list[Steps]:
    """Decode as one batch until each request has as many tokens."""
    found: dict[int, Steps] = {item.seq: [(first,)] for item, first in begun}
    going = [item for item, _ in begun]
    while going:
        worker.step += 1
        result = await worker.group.step(StepPlan(step=worker.step, items=tuple(going)))
        gained = {item.seq: tuple(token.token_id for token in result.tokens if token.seq == item.seq) for item in going}
        for seq, tokens in gained.items():
            found[seq].append(tokens)
        going = [
            StepItem(seq=item.seq, start=item.start + len(gained[item.seq]), num_tokens=item.num_tokens, sample=True)
            for item in going
            if sum(map(len, found[item.seq])) < num_tokens
        ]
    return [found[item.seq] for item, _ in begun]
