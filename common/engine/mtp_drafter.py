"""Guessing with the model's own draft head: one pass over what the step has made known, then one for each further token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.engine.agreement import Agreement
from common.engine.attention_metadata import AttentionGeometry, SequenceView
from common.engine.drafter import Advance
from common.engine.mtp_head import FIRST_KEY, MtpHead
from common.engine.sampler import Draw


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """The hidden state `[hidden]` at `position`, whose pair waits for the token behind it."""

    position: int
    hidden: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Pairs of one sequence: hidden states `[n, hidden]` at positions from `first` on, and the tokens behind them."""

    advance: Advance
    first: int
    hidden: torch.Tensor
    token_ids: Sequence[int]

    @property
    def view(self) -> SequenceView:
        """Where they are kept: the pair of position t lies at t + 1."""
        return SequenceView(
            block_ids=self.advance.block_ids, start=self.first + FIRST_KEY, num_tokens=len(self.token_ids)
        )


class MtpDrafter:
    """See `drafter.Drafter`. `geometry` is the draft cache's, with FIRST_KEY.

    The token at a position is chosen with the random number of that position, by draft and model alike: where both agree on the
    likely tokens, they choose the same one.
    """

    needs_hidden: Final = True

    def __init__(self, head: MtpHead, geometry: AttentionGeometry, agreement: Agreement, device: torch.device) -> None:
        self._head = head
        self._geometry = geometry
        self._agreement = agreement
        self._device = device
        self._waiting: dict[int, _Waiting] = {}

    def advance(self, hidden: torch.Tensor | None, advances: Sequence[Advance]) -> list[list[int]]:
        """See `Drafter.advance`."""
        assert hidden is not None  # noqa: S101 - as `needs_hidden` says
        pairs = [found for advance in advances if (found := self._pairs(hidden, advance)).token_ids]
        pairs.sort(key=lambda each: len(each.token_ids))
        drafts: dict[int, list[int]] = {advance.seq: [] for advance in advances}
        if pairs:
            output = self._compute(pairs)
            ends = torch.tensor([len(each.token_ids) for each in pairs]).cumsum(0) - 1
            guessing = [
                at for at, each in enumerate(pairs) if each.advance.num_drafts and each.advance.next_token is not None
            ]
            self._guess([pairs[at].advance for at in guessing], output.index_select(0, ends[guessing]), drafts)
        return [drafts[advance.seq] for advance in advances]

    def forget(self, seq: int) -> None:
        """See `Drafter.forget`."""
        self._waiting.pop(seq, None)

    def waiting(self, seq: int) -> torch.Tensor | None:
        """The last hidden state `[hidden]` of a sequence, whose pair waits for the token behind it."""
        found = self._waiting.get(seq)
        return None if found is None else found.hidden

    def begin(self, seq: int, position: int, hidden: torch.Tensor) -> None:
        """Go on where another worker has stopped: its last hidden state, at `position`, waits for the token behind it."""
        self._waiting[seq] = _Waiting(position=position, hidden=hidden)

    def _pairs(self, hidden: torch.Tensor, advance: Advance) -> _Pairs:
        """What has become a pair with this step; the last state waits if the token behind it is not known."""
        count = len(advance.token_ids)
        rows = hidden.narrow(0, advance.first_row, count)
        first, token_ids = advance.start, [*advance.token_ids[1:]]
        before = self._waiting.pop(advance.seq, None)
        if before is not None and before.position == advance.start - 1:
            first -= 1
            token_ids.insert(0, advance.token_ids[0])
            rows = torch.cat((before.hidden[None], rows))
        if advance.next_token is None:
            self._waiting[advance.seq] = _Waiting(position=advance.end - 1, hidden=rows[-1].clone())
        else:
            token_ids.append(advance.next_token)
        return _Pairs(advance=advance, first=first, hidden=rows[: len(token_ids)], token_ids=token_ids)

    def _compute(self, pairs: Sequence[_Pairs]) -> torch.Tensor:
        token_ids = [token for each in pairs for token in each.token_ids]
        positions = [each.first + i for each in pairs for i in range(len(each.token_ids))]
        return self._head.forward(
            torch.cat([each.hidden for each in pairs]),
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self._geometry.build([each.view for each in pairs]),
        )

    def _guess(self, advances: list[Advance], output: torch.Tensor, drafts: dict[int, list[int]]) -> None:
        """Guess token after token, each from the pair of the last output and the last guess; `output [n, hidden]` is the first."""
        depth = 0
        while advances:
            draws = [_draw(advance, depth) for advance in advances]
            chosen = self._agreement.choose(self._head.logits(output), draws)
            for advance, token in zip(advances, chosen, strict=True):
                drafts[advance.seq].append(token)
            going = [at for at, advance in enumerate(advances) if advance.num_drafts > depth + 1]
            advances = [advances[at] for at in going]
            if advances:
                pairs = [
                    _Pairs(
                        advance=advance,
                        first=advance.end + depth,
                        hidden=output[at : at + 1],
                        token_ids=[chosen[at]],
                    )
                    for at, advance in zip(going, advances, strict=True)
                ]
                output = self._compute(pairs)
            depth += 1


def _draw(advance: Advance, depth: int) -> Draw:
    """The draw of the token that the guess is of: the one that the model will choose there."""
    position = advance.end + 1 + depth
    return Draw(
        sampling=advance.sampling,
        position=position,
        num_generated=max(0, position - advance.num_prompt_tokens),
    )
