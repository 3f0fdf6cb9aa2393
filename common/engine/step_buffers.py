"""The inputs of a step, in memory that stays where it is from step to step and is filled outside the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.attention_metadata import AttentionGeometry, AttentionMetadata, SequenceView
from contracts.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class StepSequence:
    """One sequence's share of a step: tokens at positions `[start, start + len(token_ids))`.

    `block_ids` are this rank's blocks of the sequence; logits are wanted for the last `num_logits` of the tokens.
    """

    slot: int
    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows `[first, first + num_tokens)` of the step are successive tokens of the sequence in `slot`."""

    slot: int
    first: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What `forward` reads. Rows are the single tokens (`slots[i]` is row i's state slot), then the chunks.

    `token_ids`, `positions` `[T]` int64; `slot_index` `[singles]` int64 has the same numbers as `slots`; `logit_rows` `[L]` int64 are
    the rows whose logits are wanted, ascending, and `logit_order` `[L]` int64 puts them into the order in which the sequences were
    given. Behind the last layer's caches nothing else is needed: `last_attention` has those rows as its queries.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[int, ...]
    slot_index: torch.Tensor
    chunks: tuple[Chunk, ...]
    attention: AttentionMetadata
    last_attention: AttentionMetadata
    logit_rows: torch.Tensor
    logit_order: torch.Tensor


class StepBuffers:
    """Room for steps of up to `max_tokens` tokens of up to `max_sequences` sequences."""

    def __init__(
        self, geometry: AttentionGeometry, *, max_tokens: int, max_sequences: int, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._logit_rows = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._logit_order = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def fill(self, sequences: Sequence[StepSequence]) -> StepInput:
        """Lay out a step. The result is valid until the next `fill`.

        Raises `InvalidValueError` for a step that is empty or too large, or a sequence without tokens or with too few blocks.
        """
        self._check(sequences)
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].token_ids) > 1)
        ordered = [sequences[i] for i in order]
        token_ids = [token for sequence in ordered for token in sequence.token_ids]
        positions: list[int] = []
        chunks: list[Chunk] = []
        logit_rows: list[list[int]] = [[] for _ in sequences]
        slots: list[int] = []
        for index, sequence in zip(order, ordered, strict=True):
            first, count = len(positions), len(sequence.token_ids)
            positions.extend(range(sequence.start, sequence.start + count))
            logit_rows[index] = list(range(first + count - sequence.num_logits, first + count))
            if count == 1:
                slots.append(sequence.slot)
            else:
                chunks.append(Chunk(slot=sequence.slot, first=first, num_tokens=count))
        views = [
            SequenceView(block_ids=sequence.block_ids, start=sequence.start, num_tokens=len(sequence.token_ids))
            for sequence in ordered
        ]
        wanted_rows = sorted(row for rows in logit_rows for row in rows)
        place = {row: at for at, row in enumerate(wanted_rows)}
        attention = last_attention = self.geometry.build(views)
        if len(wanted_rows) < len(positions):
            last_attention = self.geometry.only(attention, views, [sequence.num_logits for sequence in ordered])
        return StepInput(
            token_ids=_put(self._token_ids, token_ids),
            positions=_put(self._positions, positions),
            slots=tuple(slots),
            slot_index=_put(self._slots, slots),
            chunks=tuple(chunks),
            attention=attention,
            last_attention=last_attention,
            logit_rows=_put(self._logit_rows, wanted_rows),
            logit_order=_put(self._logit_order, [place[row] for rows in logit_rows for row in rows]),
        )

    def _check(self, sequences: Sequence[StepSequence]) -> None:
        total = sum(len(sequence.token_ids) for sequence in sequences)
        if not 1 <= total <= self.max_tokens:
            raise InvalidValueError(field="tokens of a step", value=total, rule=f"1 to {self.max_tokens}")
        if len(sequences) > self.max_sequences:
            raise InvalidValueError(
                field="sequences of a step", value=len(sequences), rule=f"at most {self.max_sequences}"
            )
        span = self.geometry.block_size * self.geometry.dcp_size
        for sequence in sequences:
            count = len(sequence.token_ids)
            if not 0 <= sequence.num_logits <= count or count == 0:
                rule = "1 or more tokens, and logits for at most as many"
                raise InvalidValueError(field="step sequence", value=(count, sequence.num_logits), rule=rule)
            needed = -(-(sequence.start + count) // span)
            if len(sequence.block_ids) < needed:
                rule = f"{needed} or more, for {sequence.start + count} tokens"
                raise InvalidValueError(field="blocks of a sequence", value=len(sequence.block_ids), rule=rule)


def _put(buffer: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    view = buffer[: len(values)]
    if values:
        view.copy_(torch.tensor(values, dtype=buffer.dtype))
    return view
