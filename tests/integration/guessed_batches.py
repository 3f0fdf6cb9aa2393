"""Batches of requests on engines that guess, with or without a handoff before: what each step gave to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from contracts.rank import StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.handoff_pairs import NUM_SLOTS, Worker, bind_all, prefill_all, prefill_over

Steps = list[tuple[int, ...]]
"""What a request got: its first token, then what each step gave it, a token and as many guesses as were right."""
RELEASE_MS = 5000
TEXT = """\
In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon the face \
of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be light: and there was light. And \
God saw the light, that it was good: and God divided the light from the darkness. And God called the light Day, and the darkness he \
called Night. And the evening and the morning were the first day. """
"""A draft head guesses better what has been said before: tests repeat it."""


async def generate_all(
    source: Worker | None, destination: Worker, prompts: Sequence[tuple[int, ...]], depth: int, num_tokens: int
) -> list[Steps]:
    """As many tokens of each prompt, or some more, in batches as large as there are slots; `depth` guesses are asked for.

    Prompts are computed at `source` and handed over, or, without one, by the worker that goes on with them.
    """
    room = num_tokens + depth + 1
    sampling = SamplingParams(max_tokens=room, seed=1, temperature=0.0, ignore_eos=True)
    found: list[Steps] = []
    for begin in range(0, len(prompts), NUM_SLOTS):
        batch = prompts[begin : begin + NUM_SLOTS]
        if source is None:
            await bind_all(destination, batch, sampling, room)
            first = await prefill_all(destination, batch)
        else:
            first = await prefill_over(source, destination, batch, sampling, room)
        begun = []
        for seq, prompt in enumerate(batch, 1):
            item = StepItem(seq=seq, start=len(prompt), num_tokens=1 + depth, sample=True)
            if source is not None:
                item = msgspec.structs.replace(item, token_ids=(first[seq],), bootstrap=True)
            begun.append((item, first[seq]))
        found += await decode_all(destination, begun, num_tokens)
        for worker in (destination,) if source is None else (source, destination):
            assert await worker.group.release(tuple(first), worker.next_generation(), RELEASE_MS) == frozenset()
    return found


async def decode_all(worker: Worker, begun: Iterable[tuple[StepItem, int]], num_tokens: int) -> list[Steps]:
    """Go on as one batch from these items, each with the token before it, until each request has as many tokens.

    Each step asks for as many guesses as the first.
    """
    found: dict[int, Steps] = {}
    going: list[StepItem] = []
    for item, first in begun:
        found[item.seq] = [(first,)]
        going.append(item)
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
    return list(found.values())


def tokens_of(found: Sequence[Steps], num_tokens: int) -> list[list[int]]:
    """The first tokens of each request, whichever steps they came with."""
    return [[token for step in steps for token in step][:num_tokens] for steps in found]


def accepted(found: Sequence[Steps]) -> list[list[int]]:
    """How many guesses were right in each step of each request."""
    return [[len(step) - 1 for step in steps[1:]] for steps in found]
