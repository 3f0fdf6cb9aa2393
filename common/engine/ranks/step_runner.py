"""Running one step on one rank: agree, compute, sample, tell all ranks, push what is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.engine.collectives.port import CollectiveAbortedError, Collectives
from common.engine.drafts.drafter import Advance, Drafter, num_accepted
from common.engine.drafts.handoff import DraftHandoff
from common.engine.model.model import Model, Output
from common.engine.model.sampler import NO_TOKEN, Draw
from common.engine.model.tensor_parallel import SAMPLING_RANK
from common.engine.ranks.agreement import AgreedError, Agreement
from common.engine.ranks.bound_sequence import BoundSequence
from common.engine.ranks.step_buffers import StepBuffers, StepInput, StepSequence
from common.engine.ranks.step_pushes import StepPush, push_of
from common.engine.transfer.push_task import PushTask
from common.engine.transfer.pusher import Pusher
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.rank import SampledToken, StepDone, StepItem, StepPlan


@dataclass(kw_only=True)
class _Noted:
    """What a step leaves beside its tokens: see `StepDone`."""

    layer_started_ns: list[int] = field(default_factory=list)
    draft_ns: int = 0
    num_drafts: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class StepRunner:
    """Runs steps one after the other. `collectives` is None with one rank, `drafter` where nobody guesses.

    `draft_handoff` is there where the drafter keeps a cache, which can be handed over. `depth` tokens are guessed at most: the
    caches have room for as many states.
    """

    def __init__(
        self,
        *,
        model: Model,
        buffers: StepBuffers,
        agreement: Agreement,
        collectives: Collectives | None,
        pusher: Pusher,
        clock: Clock,
        drafter: Drafter | None = None,
        draft_handoff: DraftHandoff | None = None,
        depth: int = 0,
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._agreement = agreement
        self._drafter = drafter
        self._draft_handoff = draft_handoff
        self._depth = depth
        self._group = collectives if collectives is not None and collectives.size > 1 else None
        self._pusher = pusher
        self._clock = clock

    def run(self, plan: StepPlan, sequences: dict[int, BoundSequence], rank: int) -> StepDone:
        """Run `plan`. All ranks give the same verdict: an error on one is an error on each.

        An error of code WORKER_LOST means that the ranks can no longer agree on anything: the engine must be given up.
        """
        started_ns = self._clock.monotonic_ns()
        noted = _Noted()
        tokens: tuple[SampledToken, ...] = ()
        error: ErrorInfo | None = None
        try:
            tokens = self._run(plan, sequences, noted)
        except CollectiveAbortedError as failure:
            error = ErrorInfo(code=ErrorCode.WORKER_LOST, message=failure.message)
        except AgreedError as failure:
            error = failure.info
        except Exception as failure:  # noqa: BLE001 - the other ranks wait in a collective: they must be told
            reason = f"{type(failure).__name__}: {failure}"
            code = ErrorCode.WORKER_FAILED
            if self._group is not None:
                self._group.abort(reason)
                code = ErrorCode.WORKER_LOST
            error = ErrorInfo(code=code, message=reason)
        return StepDone(
            rank=rank,
            step=plan.step,
            tokens=tokens if error is None and rank == SAMPLING_RANK else (),
            started_ns=started_ns,
            ended_ns=self._clock.monotonic_ns(),
            layer_started_ns=tuple(noted.layer_started_ns),
            draft_ns=noted.draft_ns,
            num_drafts=tuple(noted.num_drafts) if any(noted.num_drafts) else (),
            failed=tuple(noted.failed),
            error=error,
        )

    def _run(self, plan: StepPlan, sequences: dict[int, BoundSequence], noted: _Noted) -> tuple[SampledToken, ...]:
        begun = [item for item in plan.items if item.bootstrap]
        if begun:
            began_ns = self._clock.monotonic_ns()
            self._begin(begun, sequences)
            noted.draft_ns += self._clock.monotonic_ns() - began_ns
        failure: Exception | None = None
        try:
            bound = [_find(item, sequences) for item in plan.items]
            laid = [self._resolve(item, sequence) for item, sequence in zip(plan.items, bound, strict=True)]
            step = self._buffers.fill(laid)
        except Exception as error:  # noqa: BLE001 - one rank's failure becomes everybody's verdict
            failure = error
        self._agreement.agree(failure)
        pushes = [
            push
            for item, sequence in zip(plan.items, bound, strict=True)
            if (push := push_of(item, sequence, self._buffers.geometry.block_size)) is not None
        ]
        noted.num_drafts += [max(0, each.num_logits - 1) for each in laid]
        output = self._forward(step, pushes, noted.layer_started_ns)
        for push in pushes:
            sequences[push.binding.seq].pushed_end = push.chunk.end
        drawn = [(sequence, each) for sequence, each in zip(bound, laid, strict=True) if each.num_logits]
        chosen = iter(self._sample(output.logits, drawn) if drawn else ())
        tokens = [next(chosen) if each.num_logits else [] for each in laid]
        noted.failed += [
            item.seq
            for item, each, found in zip(plan.items, laid, tokens, strict=True)
            if each.num_logits and not found
        ]
        for sequence, each, found in zip(bound, laid, tokens, strict=True):
            _move_on(sequence, each, found)
        if self._drafter is not None:
            began_ns = self._clock.monotonic_ns()
            self._draft(self._drafter, output, step, [*zip(bound, laid, tokens, strict=True)])
            if self._draft_handoff is not None:
                now_ns, handoff = self._clock.monotonic_ns(), self._draft_handoff
                self._queue([task for push in pushes for task in push.of_draft(handoff, now_ns)])
            noted.draft_ns += self._clock.monotonic_ns() - began_ns
        return tuple(
            SampledToken(seq=item.seq, position=sequence.last_position - len(found) + 1 + i, token_id=token)
            for item, sequence, found in zip(plan.items, bound, tokens, strict=True)
            for i, token in enumerate(found)
        )

    def _begin(self, items: Sequence[StepItem], sequences: dict[int, BoundSequence]) -> None:
        """Guess for sequences whose draft another worker has handed over, behind the one token that they begin with."""
        failure: Exception | None = None
        try:
            for item in items:
                self._check_begin(item)
            bound = [_find(item, sequences) for item in items]
        except Exception as error:  # noqa: BLE001 - one rank's failure becomes everybody's verdict
            failure = error
        self._agreement.agree(failure)
        drafter, handoff = self._drafter, self._draft_handoff
        assert drafter is not None and handoff is not None  # noqa: S101, PT018 - `_check_begin` has looked
        advances = [handoff.take(sequence.binding, item) for item, sequence in zip(items, bound, strict=True)]
        for sequence, drafts in zip(bound, drafter.advance(None, advances), strict=True):
            sequence.drafts = drafts

    def _check_begin(self, item: StepItem) -> None:
        if self._drafter is None or self._draft_handoff is None:
            rule = "false: no draft's cache is kept here that could have been handed over"
            raise InvalidValueError(field="bootstrap", value=True, rule=rule)
        if len(item.token_ids) != 1 or item.start < 1 or not 1 <= item.num_tokens <= self._depth + 1 or not item.sample:
            rule = f"one token id behind a prompt, and 1 to {self._depth + 1} tokens, with sample"
            raise InvalidValueError(field="bootstrap", value=(item.start, item.num_tokens, item.token_ids), rule=rule)
        self._check_tokens(item.token_ids)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        vocab_size = self._model.config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            # With several ranks, a token that belongs to none of them would pass for a vector of zeros.
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidValueError(field="token_ids", value=wrong, rule=f"0 to vocab_size - 1 ({vocab_size - 1})")

    def _forward(self, step: StepInput, pushes: Sequence[StepPush], layer_started_ns: list[int]) -> Output:
        def on_layer_start(_: int) -> None:
            layer_started_ns.append(self._clock.monotonic_ns())

        def on_layer_written(layer: int) -> None:
            self._submit(layer, pushes)

        keep_hidden = self._drafter is not None and self._drafter.needs_hidden
        if not pushes:
            return self._model.forward(step, keep_hidden=keep_hidden)
        return self._model.forward(
            step, on_layer_start=on_layer_start, on_layer_written=on_layer_written, keep_hidden=keep_hidden
        )

    def _draft(
        self,
        drafter: Drafter,
        output: Output,
        step: StepInput,
        done: Sequence[tuple[BoundSequence, StepSequence, Sequence[int]]],
    ) -> None:
        """Tell the drafter how far everybody has come, and keep its guesses; `done` has the tokens that each was given."""
        advances = [
            self._advance(sequence, laid, first_row, is_given=bool(found))
            for (sequence, laid, found), first_row in zip(done, step.first_rows, strict=True)
        ]
        for (sequence, _, _), drafts in zip(done, drafter.advance(output.hidden, advances), strict=True):
            sequence.drafts = drafts

    def _advance(self, sequence: BoundSequence, laid: StepSequence, first_row: int, *, is_given: bool) -> Advance:
        binding = sequence.binding
        end = sequence.last_position if is_given else laid.end
        geometry = self._buffers.geometry
        num_places = len(binding.block_ids) * geometry.block_size * geometry.dcp_size
        # Where the cache is handed on, its new owner computes the pair of the last prompt token: it has the token behind it.
        # And a draft keeps that pair in the token's place: where memory ends before it, the pair waits until there is more.
        goes_on = is_given and binding.push is None and end < num_places
        return Advance(
            seq=binding.seq,
            block_ids=binding.block_ids,
            start=laid.start,
            token_ids=laid.token_ids[: end - laid.start],
            next_token=sequence.last_token if goes_on else None,
            first_row=first_row,
            num_drafts=max(0, min(self._depth, num_places - end - 1)) if goes_on else 0,
            sampling=binding.sampling,
            num_prompt_tokens=binding.num_prompt_tokens,
        )

    def _sample(
        self, logits: torch.Tensor | None, drawn: Sequence[tuple[BoundSequence, StepSequence]]
    ) -> list[list[int]]:
        """The tokens that each sequence goes on with, on all ranks: the model's own choices, as far as its guesses were right.

        They end before the first row whose logits are not sound: none where that is the first of a sequence, as it is when what
        is wrong with a guess is its key or value, which the rows before it read too. The choice at a position depends on what stands before it and on the position's random number, never on what was guessed:
        so guesses change nothing but the number of steps.
        """
        draws = [
            Draw.at(position, sequence.binding.sampling, sequence.binding.num_prompt_tokens)
            for sequence, laid in drawn
            for position in range(laid.end - laid.num_logits + 1, laid.end + 1)
        ]
        chosen = iter(self._agreement.choose(logits, draws))
        tokens = []
        for _, laid in drawn:
            choices = [next(chosen) for _ in range(laid.num_logits)]
            guesses = laid.token_ids[len(laid.token_ids) - laid.num_logits + 1 :]
            found = choices[: num_accepted(guesses, choices) + 1]
            tokens.append(found[: found.index(NO_TOKEN)] if NO_TOKEN in found else found)
        return tokens

    def _resolve(self, item: StepItem, sequence: BoundSequence) -> StepSequence:
        """The step's tokens of one sequence; without token ids the one of the step before, and guesses as far as there are some."""
        token_ids: Sequence[int] = item.token_ids
        if not token_ids:
            most = self._depth + 1
            if not 1 <= item.num_tokens <= most or sequence.last_position != item.start:
                rule = (
                    f"1 to {most} tokens at {sequence.last_position}, where the last sampled token stands, or explicit "
                    "token ids"
                )
                raise InvalidValueError(field="step item", value=(item.start, item.num_tokens), rule=rule)
            token_ids = (sequence.last_token, *sequence.drafts[: item.num_tokens - 1])
        elif item.bootstrap:
            token_ids = (*token_ids, *sequence.drafts[: item.num_tokens - 1])
        elif len(token_ids) != item.num_tokens:
            raise InvalidValueError(
                field="num_tokens", value=item.num_tokens, rule=f"the {len(token_ids)} token ids given"
            )
        self._check_tokens(token_ids)
        guessed = item.bootstrap or not item.token_ids
        return StepSequence(
            slot=sequence.binding.slot,
            block_ids=sequence.binding.block_ids,
            start=item.start,
            token_ids=token_ids,
            num_logits=(len(token_ids) if guessed else 1) if item.sample else 0,
            state_row=sequence.state_row,
            checkpoints=guessed and self._depth > 0,
        )

    def _submit(self, layer: int, pushes: Sequence[StepPush]) -> None:
        """Queue all that the layer has ready in one go, so that its parts leave together."""
        now_ns, paged = self._clock.monotonic_ns(), layer in self._model.caches.key
        self._queue([task for push in pushes for task in push.of_layer(layer, now_ns, paged=paged)])

    def _queue(self, tasks: list[PushTask]) -> None:
        if tasks:
            self._pusher.submit(tasks)


def _find(item: StepItem, sequences: dict[int, BoundSequence]) -> BoundSequence:
    sequence = sequences.get(item.seq)
    if sequence is None:
        raise InvalidValueError(field="seq", value=item.seq, rule="a bound sequence")
    return sequence


def _move_on(sequence: BoundSequence, laid: StepSequence, found: Sequence[int]) -> None:
    """Note what a step gave a sequence: the tokens `found`, the last of which is still to be computed."""
    sequence.drafts = ()
    if found:
        num_right = len(laid.token_ids) - laid.num_logits + len(found)
        sequence.last_token, sequence.last_position = found[-1], laid.start + num_right
        sequence.state_row = num_right - 1 if laid.checkpoints else 0
    else:
        sequence.state_row = len(laid.token_ids) - 1 if laid.checkpoints else 0
