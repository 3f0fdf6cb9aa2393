"""The inputs of a step, in memory that stays where it is from step to step and is filled outside the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from common.engine.model.attention_metadata import AttentionGeometry, AttentionMetadata, SequenceView
from contracts.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class StepSequence:
    """One sequence's share of a step: tokens at positions `[start, start + len(token_ids))`.

    `block_ids` are this rank's blocks of the sequence; logits are wanted for the last `num_logits` of the tokens. Its recurrent
    states begin as they are in `state_row`. With `checkpoints` the state behind token i is kept in row i, so that the next step
    may begin behind any of them; otherwise the state behind all tokens is in row 0.
    """

    slot: int
    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    num_logits: int
    state_row: int = 0
    checkpoints: bool = False

    @property
    def end(self) -> int:
        """The position behind the last of its tokens."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows `[first, first + num_tokens)` of the step are successive tokens of the sequence in `slot`, whose state is in `state_row`."""

    slot: int
    first: int
    num_tokens: int
    state_row: int = 0


@dataclass(frozen=True, kw_only=True)
class Round:
    """`num_tokens` successive tokens of each sequence in `slots`, computed one after the other; rows begin at `first`.

    Row `first + i * num_tokens + t` is token t of the sequence in `slots[i]`; behind it the state is kept in state row t. The
    states begin in `state_rows` `[B]` int64, or in row 0 if that is None. `slot_index` `[B]` int64 has the numbers of `slots`.
    """

    first: int
    num_tokens: int
    slots: tuple[int, ...]
    slot_index: torch.Tensor
    state_rows: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What `forward` reads. Rows are the tokens of the rounds, then of the chunks.

    `token_ids`, `positions` `[T]` int64; `logit_rows` `[L]` int64 are the rows whose logits are wanted, ascending, and
    `logit_order` `[L]` int64 puts them into the order in which the sequences were given; `first_rows` says where each of these
    begins. Behind the last layer's caches nothing else is needed: `last_attention` has those rows as its queries.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rounds: tuple[Round, ...]
    chunks: tuple[Chunk, ...]
    attention: AttentionMetadata
    last_attention: AttentionMetadata
    logit_rows: torch.Tensor
    logit_order: torch.Tensor
    first_rows: tuple[int, ...]


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
        self._state_rows = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._logit_rows = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._logit_order = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def fill(self, sequences: Sequence[StepSequence]) -> StepInput:
        """Lay out a step. The result is valid until the next `fill`.

        Raises `InvalidValueError` for a step that is empty or too large, or a sequence without tokens or with too few blocks.
        """
        self._check(sequences)
        order = sorted(range(len(sequences)), key=lambda i: _rank(sequences[i]))
        ordered = [sequences[i] for i in order]
        token_ids = [token for sequence in ordered for token in sequence.token_ids]
        positions: list[int] = []
        chunks: list[Chunk] = []
        first_rows = [0] * len(sequences)
        for index, sequence in zip(order, ordered, strict=True):
            first, count = len(positions), len(sequence.token_ids)
            positions.extend(range(sequence.start, sequence.start + count))
            first_rows[index] = first
            if not _goes_round(sequence):
                chunks.append(Chunk(slot=sequence.slot, first=first, num_tokens=count, state_row=sequence.state_row))
        logit_rows = [
            range(first + len(sequence.token_ids) - sequence.num_logits, first + len(sequence.token_ids))
            for first, sequence in zip(first_rows, sequences, strict=True)
        ]
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
            rounds=self._rounds([sequence for sequence in ordered if _goes_round(sequence)]),
            chunks=tuple(chunks),
            attention=attention,
            last_attention=last_attention,
            logit_rows=_put(self._logit_rows, wanted_rows),
            logit_order=_put(self._logit_order, [place[row] for rows in logit_rows for row in rows]),
            first_rows=tuple(first_rows),
        )

    def _rounds(self, sequences: Sequence[StepSequence]) -> tuple[Round, ...]:
        """Rounds of sequences that come in order of their number of tokens."""
        slots = _put(self._slots, [sequence.slot for sequence in sequences])
        state_rows = _put(self._state_rows, [sequence.state_row for sequence in sequences])
        rounds: list[Round] = []
        first = at = 0
        for num_tokens, members in groupby(sequences, lambda sequence: len(sequence.token_ids)):
            group = list(members)
            some = slice(at, at + len(group))
            rounds.append(
                Round(
                    first=first,
                    num_tokens=num_tokens,
                    slots=tuple(sequence.slot for sequence in group),
                    slot_index=slots[some],
                    state_rows=state_rows[some] if any(sequence.state_row for sequence in group) else None,
                )
            )
            at += len(group)
            first += len(group) * num_tokens
        return tuple(rounds)

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


def _goes_round(sequence: StepSequence) -> bool:
    """Whether its tokens are computed one after the other: a single one, or such as may be taken back."""
    return len(sequence.token_ids) == 1 or sequence.checkpoints


def _rank(sequence: StepSequence) -> tuple[bool, int]:
    """Rounds come first, in order of their number of tokens; chunks stay as they were given."""
    goes_round = _goes_round(sequence)
    return not goes_round, len(sequence.token_ids) if goes_round else 0


def _put(buffer: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    view = buffer[: len(values)]
    if values:
        view.copy_(torch.tensor(values, dtype=buffer.dtype))
    return view
