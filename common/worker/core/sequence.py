"""One request inside a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.worker.core.blocks import Reservation
from common.worker.core.guess_counts import GuessCounts
from contracts.handoff import PromptTimes
from contracts.rank import PushTarget
from contracts.requests import FinishReason, SamplingParams
from contracts.trace import TraceContext


class SequenceState(StrEnum):
    """Where a sequence is in its worker."""

    WAITING = "waiting"  # wants memory
    RUNNING = "running"  # takes part in steps
    HELD = "held"  # computes nothing, keeps its memory: reserved for a handoff, or finished and not yet released


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request as the scheduler of replica `dp_rank` sees it.

    Positions `[0, num_computed)` have cache. `pending_token` is the token at position `num_computed` when it has been
    sampled but not computed; while it is None the prompt's own tokens come next. `trace` is the hop of the command that brought
    it, at `accepted_ns`; one that waited has its memory since
    `bound_ns`; a mixed worker had its first token at `computed_ns`; `secret` lets peers reach its memory; the prompt ends with `num_delivered_tokens` that earlier attempts
    have generated. One that was preempted `num_preemptions` times computes its prompt anew, and after it the
    `num_recomputed_tokens` of its output that it had; `outcome` says in one word how it ended, for those who count. Where tokens are
    guessed, they are for one that `is_guessed`; with `bootstrap` its next step goes on from what another worker's draft has left.
    `guesses` counts what came of them. `cache_differences` says, once it has been looked at, how the cache that came differs from the
    one that was computed; it is empty when it does not. One that `is_deserted` was stopped because its router seemed gone.
    """

    seq: int
    dp_rank: int = 0
    handoff_id: str
    request_id: str
    attempt: int
    router_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    num_delivered_tokens: int = 0
    trace: TraceContext | None = None
    prompt_ids: tuple[int, ...] = ()
    memory: Reservation | None = None
    secret: str = field(default="", repr=False)
    push: PushTarget | None = None
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    pending_token: int | None = None
    pending_is_sampled: bool = False
    output_ids: list[int] = field(default_factory=list)
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    accepted_ns: int = 0
    bound_ns: int = 0
    computed_ns: int = 0
    outcome: str = ""
    is_guessed: bool = True
    bootstrap: bool = False
    cache_differences: str | None = None
    is_deserted: bool = False
    guesses: GuessCounts = field(default_factory=GuessCounts)

    @property
    def prompt_times(self) -> PromptTimes | None:
        """What the prompt took, once a mixed worker has computed it."""
        if not self.computed_ns:
            return None
        return PromptTimes(
            queue_ms=(self.bound_ns - self.accepted_ns) / 1e6, compute_ms=(self.computed_ns - self.bound_ns) / 1e6
        )

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the request so far, those of earlier attempts with them."""
        return self.num_delivered_tokens + len(self.output_ids)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens without cache, and after a preemption those of the output that it had."""
        return max(0, self.num_prompt_tokens + self.num_recomputed_tokens - self.num_computed)

    @property
    def can_recompute(self) -> bool:
        """Whether its prompt is known here, so that lost cache can be computed again."""
        return len(self.prompt_ids) == self.num_prompt_tokens

    def known_ids(self, start: int, num_tokens: int) -> tuple[int, ...]:
        """Tokens at positions `[start, start + num_tokens)` of prompt and output."""
        end = start + num_tokens
        output = self.output_ids[max(0, start - self.num_prompt_tokens) : max(0, end - self.num_prompt_tokens)]
        return (*self.prompt_ids[start:end], *output)

    def rewind(self) -> None:
        """Nothing has cache any more: what was the prompt and what is the output so far are to be computed again."""
        self.num_preemptions += 1
        self.num_computed = 0
        self.num_recomputed_tokens = len(self.output_ids)
        self.pending_token = None
        self.pending_is_sampled = False

    def finish_reason(self, token: int, num_output_tokens: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with `token`, which makes `num_output_tokens` of its output; None when it goes on."""
        may_end = not self.sampling.ignore_eos and num_output_tokens > self.sampling.min_tokens
        if token in eos_token_ids and may_end:
            return FinishReason.STOP
        if num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
