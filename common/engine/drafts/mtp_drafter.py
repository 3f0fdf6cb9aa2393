"""Guessing with the model's own draft head: one pass over what the step has made known, then one for each further token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.engine.drafts.drafter import Advance
from common.engine.model.attention_metadata import AttentionGeometry, SequenceView
from common.engine.model.mtp_head import FIRST_KEY, MtpHead
from common.engine.model.sampler import Draw
from common.engine.model.weights import MtpWeights
from common.engine.ranks.agreement import Agreement


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A sequence whose pairs of positions `[0, end)` are in the cache.

    `waiting` is the hidden state `[hidden]` at position `end`, if it is known and the token behind it is not.
    """

    end: int = 0
    waiting: torch.Tensor | None = None


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
    likely tokens, they choose the same one. Nothing is guessed for a sequence of which earlier pairs are missing: one that came
    from another worker without its draft's cache.
    """

    needs_hidden: Final = True

    def __init__(self, head: MtpHead, geometry: AttentionGeometry, agreement: Agreement, device: torch.device) -> None:
        self._head = head
        self._geometry = geometry
        self._agreement = agreement
        self._device = device
        self._kept: dict[int, _Kept] = {}

    @property
    def weights(self) -> MtpWeights:
        """Those of its head."""
        return self._head.weights

    def advance(self, hidden: torch.Tensor | None, advances: Sequence[Advance]) -> list[list[int]]:
        """See `Drafter.advance`. Of an advance without tokens only what was waiting becomes a pair: that needs no `hidden`."""
        pairs = [found for advance in advances if (found := self._pairs(hidden, advance)) is not None]
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
        self._kept.pop(seq, None)

    def waiting(self, seq: int) -> torch.Tensor | None:
        """The last hidden state `[hidden]` of a sequence, whose pair waits for the token behind it."""
        return self._kept.get(seq, _Kept()).waiting

    def begin(self, seq: int, position: int, hidden: torch.Tensor) -> None:
        """Go on where another worker has stopped: the cache has its pairs before `position`, and the state there waits for its token."""
        self._kept[seq] = _Kept(end=position, waiting=hidden)

    def _pairs(self, hidden: torch.Tensor | None, advance: Advance) -> _Pairs | None:
        """What has become a pair with this step, if anything has; the last state waits if the token behind it is not known."""
        kept = self._kept.get(advance.seq, _Kept())
        rows = [] if hidden is None else [hidden.narrow(0, advance.first_row, len(advance.token_ids))]
        behind = [*advance.token_ids] if advance.next_token is None else [*advance.token_ids, advance.next_token]
        first = advance.start
        if kept.waiting is not None and kept.end == advance.start - 1:
            first -= 1
            rows.insert(0, kept.waiting[None])
        else:
            behind = behind[1:]
        if first > kept.end:
            return None  # a gap: what the pairs before it should have left is another sequence's
        states = torch.cat(rows)
        waiting = states[-1].clone() if advance.next_token is None else None
        self._kept[advance.seq] = _Kept(end=first + len(behind), waiting=waiting)
        return _Pairs(advance=advance, first=first, hidden=states[: len(behind)], token_ids=behind) if behind else None

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
            draws = [Draw.at(each.end + 1 + depth, each.sampling, each.num_prompt_tokens) for each in advances]
            logits = self._head.logits(output)
            if logits is not None:
                # A draft that has no idea guesses wrong, and no more: the model's own numbers are what must be sound.
                logits.nan_to_num_()
            chosen = self._agreement.choose(logits, draws)
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
