"""A model and a draft head whose distributions are tables, under the engine's own step runner, draft loop and sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from common.engine.drafts.mtp_drafter import MtpDrafter
from common.engine.model.attention_metadata import AttentionGeometry, AttentionMetadata, SequenceView
from common.engine.model.model import Output
from common.engine.model.mtp_head import MtpHead
from common.engine.model.sampler import Sampler
from common.engine.ranks.agreement import Agreement
from common.engine.ranks.bound_sequence import BoundSequence
from common.engine.ranks.step_buffers import StepBuffers, StepInput
from common.engine.ranks.step_runner import StepRunner
from common.runtime.clock import SystemClock
from contracts.rank import BindSequence, StepItem, StepPlan
from contracts.requests import SamplingParams

VOCAB_SIZE = 8
NUM_POSITIONS = 6
BATCH = 256


class Tables:
    """Logits `[position, token, vocab]` of what follows a token at a position: the model's and the draft's, at temperature 1."""

    def __init__(self, seed: int, *, likeness: float = 1.0, num_positions: int = NUM_POSITIONS) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_positions, VOCAB_SIZE, VOCAB_SIZE)
        self.model = torch.randn(shape, generator=generator)
        self.draft = self.model * likeness + torch.randn(shape, generator=generator) * 0.7

    def chosen(self, position: int, token: int) -> list[float]:
        """Probabilities of the model behind a token."""
        return _probabilities(self.model[position, token])

    def guessed(self, position: int, token: int) -> list[float]:
        """Those of the draft."""
        return _probabilities(self.draft[position, token])


def _probabilities(logits: torch.Tensor) -> list[float]:
    found: list[float] = torch.softmax(logits.double(), -1).tolist()
    return found


class ToyModel:
    """Its hidden states `[T, 2]` are the position and the token of each row."""

    def __init__(self, tables: Tables) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self._tables = tables

    def forward(self, step: StepInput, *, keep_hidden: bool = False) -> Output:
        """See `Model.forward`."""
        rows = step.logit_rows.index_select(0, step.logit_order)
        logits = self._tables.model[step.positions[rows], step.token_ids[rows]].clone()
        hidden = torch.stack((step.positions, step.token_ids), -1).float()
        return Output(logits, hidden if keep_hidden else None)


class ToyHead:
    """Its outputs are the position and the token of what a pair adds."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, metadata: object
    ) -> torch.Tensor:
        """See `MtpHead.forward`; the hidden state before a pair must be that of the position before it."""
        assert hidden[:, 0].long().equal(positions)
        return torch.stack((positions + 1, token_ids), -1).float()

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See `MtpHead.logits`."""
        position, token = output.long().unbind(-1)
        return self._tables.draft[position, token].clone()


class NoAttention(AttentionGeometry):
    """Metadata of nobody's attention: tables have none."""

    def build(self, sequences: Sequence[SequenceView]) -> AttentionMetadata:
        """See `AttentionGeometry.build`."""
        return AttentionMetadata(write_rows=torch.empty(0), written=None, groups=())


class ToyEngine:
    """Runs many sequences, each of one prompt token and of a seed of its own, `BATCH` at a time.

    Each has at least `min_tokens` before one of `eos`. `failed` are seeds that were given no token.
    """

    def __init__(self, tables: Tables, depth: int, *, eos: Sequence[int] = (), min_tokens: int = 0) -> None:
        self.failed: set[int] = set()
        self._min_tokens = min_tokens
        geometry = NoAttention(num_query_heads=1, num_kv_heads=1, block_size=16)
        device = torch.device("cpu")
        agreement = Agreement(Sampler(eos), None)
        head = cast("MtpHead", ToyHead(tables))
        unused: Any = None
        self._depth = depth
        self._drafter = MtpDrafter(head, geometry, agreement, device)
        self._runner = StepRunner(
            model=cast("Any", ToyModel(tables)),
            buffers=StepBuffers(geometry, max_tokens=BATCH * (depth + 1), max_sequences=BATCH, device=device),
            agreement=agreement,
            collectives=None,
            pusher=unused,
            clock=SystemClock(),
            drafter=self._drafter,
            depth=depth,
        )

    def begin(self, prompts: Mapping[int, int], position: int = 0) -> dict[int, list[int]]:
        """Give each seed its sequence, whose token at `position` is the one in `prompts`; its first token of each."""
        self._bound: dict[int, BoundSequence] = {}
        for seed in prompts:
            binding = BindSequence(
                seq=seed,
                handoff_id=f"h{seed}",
                generation=1,
                block_ids=(0,),
                slot=0,
                num_prompt_tokens=position + 1,
                sampling=SamplingParams(
                    max_tokens=NUM_POSITIONS, seed=seed, temperature=1.0, min_tokens=self._min_tokens
                ),
            )
            self._bound[seed] = BoundSequence(binding=binding, peer=None)
            # Tables need no pair of what stands before the prompt token, and without any nothing would be guessed.
            self._drafter.begin(seed, position, torch.zeros(2))
        return self._run(
            [
                StepItem(seq=seed, start=position, num_tokens=1, token_ids=(token,), sample=True, last_chunk=True)
                for seed, token in prompts.items()
            ]
        )

    def go_on(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """One more run of each sequence: at most so many tokens."""
        items = [
            StepItem(
                seq=seed,
                start=self._bound[seed].last_position,
                num_tokens=min(count, self._depth + 1),
                sample=True,
            )
            for seed, count in wanted.items()
        ]
        return self._run(items)

    def _run(self, items: Sequence[StepItem]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {item.seq: [] for item in items}
        for first in range(0, len(items), BATCH):
            done = self._runner.run(StepPlan(step=1, items=tuple(items[first : first + BATCH])), self._bound, 0)
            assert done.error is None, done.error
            self.failed.update(done.failed)
            for token in done.tokens:
                found[token.seq].append(token.token_id)
        return found
