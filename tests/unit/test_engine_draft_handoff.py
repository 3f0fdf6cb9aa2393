"""The draft head's part of a handoff on one rank: what waits for a token is left behind, and gone on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
import torch

from common.engine.drafts.drafter import Advance
from common.engine.drafts.handoff import DraftHandoff
from common.engine.drafts.mtp_drafter import MtpDrafter
from common.engine.model.attention_metadata import AttentionGeometry, AttentionMetadata, SequenceView
from common.engine.model.mtp_head import MtpHead
from common.engine.model.sampler import Sampler
from common.engine.ranks.agreement import Agreement
from common.engine.ranks.bound_sequence import BoundSequence
from common.engine.ranks.step_pushes import StepPush, push_of
from common.engine.transfer.peers import Peer
from contracts.errors import InvalidValueError
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, PushTarget, StepItem
from contracts.requests import SamplingParams

VOCAB_SIZE = 16
HIDDEN = 2
BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=8, seed=1, temperature=0.0)


class CountingHead:
    """Remembers the positions and tokens of the pairs that it computes, and guesses the token after theirs."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int, float]] = []

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, metadata: object
    ) -> torch.Tensor:
        """See `MtpHead.forward`."""
        del metadata
        self.pairs += zip(positions.tolist(), token_ids.tolist(), hidden[:, 0].tolist(), strict=True)
        return torch.stack((token_ids, token_ids), -1).float()

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See `MtpHead.logits`."""
        return torch.nn.functional.one_hot((output[:, 0].long() + 1) % VOCAB_SIZE, VOCAB_SIZE).float()


class NoAttention(AttentionGeometry):
    """Metadata of nobody's attention."""

    def build(self, sequences: Sequence[SequenceView]) -> AttentionMetadata:
        """See `AttentionGeometry.build`."""
        return AttentionMetadata(write_rows=torch.empty(0), written=None, groups=())


def drafter(head: CountingHead) -> MtpDrafter:
    """A drafter over such a head."""
    geometry = NoAttention(num_query_heads=1, num_kv_heads=1, block_size=BLOCK_SIZE)
    return MtpDrafter(cast("MtpHead", head), geometry, Agreement(Sampler(()), None), torch.device("cpu"))


def advance(start: int, *token_ids: int, next_token: int | None = None, num_drafts: int = 0) -> Advance:
    """A step of sequence 1."""
    return Advance(
        seq=1,
        block_ids=(0, 1, 2),
        start=start,
        token_ids=token_ids,
        next_token=next_token,
        first_row=0,
        num_drafts=num_drafts,
        sampling=SAMPLING,
        num_prompt_tokens=4,
    )


def states(start: int, count: int) -> torch.Tensor:
    """Hidden states that say where they stand."""
    return torch.arange(start, start + count).float()[:, None].expand(-1, HIDDEN)


def binding(**changes: Any) -> BindSequence:
    """Sequence 1."""
    values: dict[str, Any] = {
        "seq": 1,
        "handoff_id": "h1",
        "generation": 1,
        "block_ids": (0, 1, 2),
        "slot": 2,
        "num_prompt_tokens": 4,
        "sampling": SAMPLING,
    }
    return BindSequence(**(values | changes))


@pytest.mark.parametrize("chunks", [[4], [1, 3], [3, 1], [1, 1, 1, 1]], ids=str)
def test_prefill_computes_the_pairs_that_it_knows_and_leaves_the_last_state(chunks: list[int]) -> None:
    """However a prompt falls into chunks: a pair for each token but the last, whose state goes into the slot's row."""
    head = CountingHead()
    source = drafter(head)
    bootstrap = torch.zeros(3, HIDDEN)
    prompt, start = (5, 6, 7, 8), 0
    for size in chunks:
        assert source.advance(states(start, size), [advance(start, *prompt[start : start + size])]) == [[]]
        start += size
    assert head.pairs == [(0, 6, 0.0), (1, 7, 1.0), (2, 8, 2.0)]
    DraftHandoff(source, bootstrap).leave(binding())
    assert bootstrap.tolist() == [[0, 0], [0, 0], [3, 3]]


def test_decode_goes_on_with_the_pair_of_the_first_token() -> None:
    """It computes one pair, of the state that has arrived and the token that prefill has chosen, then guesses from it."""
    head = CountingHead()
    there = drafter(head)
    bootstrap = torch.zeros(3, HIDDEN)
    bootstrap[2] = 3
    item = StepItem(seq=1, start=4, num_tokens=4, token_ids=(9,), sample=True, bootstrap=True)
    taken = DraftHandoff(there, bootstrap).take(binding(), item)
    assert there.advance(None, [taken]) == [[10, 11, 12]]
    assert [pair[:2] for pair in head.pairs] == [(3, 9), (4, 10), (5, 11)]
    assert head.pairs[0][2] == 3.0
    assert there.waiting(1) is None
    # Two guesses were right, and then 1 was chosen: the true pairs take the place of those that were guessed.
    head.pairs.clear()
    assert there.advance(states(4, 3), [advance(4, 9, 10, 11, next_token=1, num_drafts=1)]) == [[2]]
    assert head.pairs == [(4, 10, 4.0), (5, 11, 5.0), (6, 1, 6.0)]


def test_of_a_cache_with_a_gap_nothing_is_guessed() -> None:
    """A sequence that was handed over without its draft's cache, step after step; computed from its beginning it is guessed for."""
    head = CountingHead()
    there = drafter(head)
    assert there.advance(states(4, 1), [advance(4, 9, next_token=10, num_drafts=2)]) == [[]]
    assert there.advance(states(5, 1), [advance(5, 10, next_token=11, num_drafts=2)]) == [[]]
    assert head.pairs == []
    assert there.advance(states(0, 2), [advance(0, 5, 6, next_token=7, num_drafts=2)]) == [[8, 9]]


def test_a_broken_state_costs_its_own_sequence_guesses_and_nobody_else_anything() -> None:
    """A draft that has no idea, as behind a corrupt cache, guesses something; its neighbour in the step guesses as if it were alone."""

    class Broken(CountingHead):
        def logits(self, output: torch.Tensor) -> torch.Tensor:
            found = super().logits(output)
            found[0] = torch.nan
            return found

    there = drafter(Broken())
    own = msgspec.structs.replace(binding(), sampling=SamplingParams(max_tokens=8, seed=1, temperature=1.0))
    item = StepItem(seq=1, start=4, num_tokens=3, token_ids=(9,), sample=True, bootstrap=True)
    bootstrap = torch.zeros(3, HIDDEN)
    advances = [DraftHandoff(there, bootstrap).take(own, item)]
    advances.append(DraftHandoff(there, bootstrap).take(binding(seq=2, slot=1), msgspec.structs.replace(item, seq=2)))
    broken, sound = there.advance(None, advances)
    assert sound == [10, 11]
    assert len(broken) == len(sound)
    assert all(0 <= token < VOCAB_SIZE for token in broken)


def test_what_was_never_computed_cannot_be_left() -> None:
    """Zeros in its place would cost guesses, and nobody would know why."""
    with pytest.raises(InvalidValueError, match="a sequence whose last hidden state waits"):
        DraftHandoff(drafter(CountingHead()), torch.zeros(3, HIDDEN)).leave(binding())


def pushes(num_prompt_tokens: int, size: int, *, cached: int = 0) -> list[StepPush]:
    """What the chunks of a prompt make ready."""
    grant = Grant(worker_id="d", incarnation="i", generation=1, block_ids=(0, 1, 2), slot=0)
    bound = BoundSequence(
        binding=binding(num_prompt_tokens=num_prompt_tokens, push=PushTarget(grant=grant, num_cached_tokens=cached)),
        peer=Peer(templates=(), parts={}, regions={}, num_blocks=3, num_slots=1),
    )
    found = []
    for start in range(0, num_prompt_tokens, size):
        count = min(size, num_prompt_tokens - start)
        last = start + count == num_prompt_tokens
        item = StepItem(seq=1, start=start, num_tokens=count, token_ids=(1,) * count, sample=last, last_chunk=last)
        push = push_of(item, bound, BLOCK_SIZE)
        if push is not None:
            bound.pushed_end = push.chunk.end
            found.append(push)
    return found


@pytest.mark.parametrize(
    ("num_prompt_tokens", "size", "cached", "expected"),
    [
        (1, 4, 0, [(1, 1)]),
        (2, 4, 0, [(1, 2)]),
        (4, 4, 0, [(1, 4)]),
        (5, 4, 0, [(1, 4), (4, 5)]),
        (9, 3, 0, [(1, 4), (4, 9)]),
        (9, 9, 1, [(1, 9)]),
        (9, 3, 8, [(8, 9)]),
    ],
)
def test_each_pair_is_pushed_once(
    num_prompt_tokens: int, size: int, cached: int, expected: list[tuple[int, int]]
) -> None:
    """Full blocks as they come and the rest at the end, from slot 1 on, but for what the destination has."""
    found = pushes(num_prompt_tokens, size, cached=cached)
    assert [(push.draft_chunk.start, push.draft_chunk.end) for push in found] == expected


def test_a_draft_s_tasks_come_behind_the_last_pair() -> None:
    """KEY and VALUE of the chunk, then the state that was left just before; what decode pulls stays."""
    source = drafter(CountingHead())
    source.advance(states(0, 4), [advance(0, 5, 6, 7, 8)])
    bootstrap = torch.zeros(3, HIDDEN)
    handoff = DraftHandoff(source, bootstrap)
    (push,) = pushes(4, 4)
    tasks = list(push.of_draft(handoff, 7))
    assert [(task.namespace, task.role, task.layer, task.chunk is None) for task in tasks] == [
        (Namespace.DRAFT, Role.KEY, 0, False),
        (Namespace.DRAFT, Role.VALUE, 0, False),
        (Namespace.DRAFT, Role.BOOTSTRAP, 0, True),
    ]
    assert bootstrap[2].tolist() == [3, 3]
    (lone,) = pushes(1, 4)
    assert [task.role for task in lone.of_draft(handoff, 7)] == [Role.BOOTSTRAP]
