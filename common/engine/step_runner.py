"""Running one step on one rank: agree, compute, sample, tell all ranks, push what is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.agreement import NO_TOKEN, AgreedError, Agreement
from common.engine.collectives.port import CollectiveAbortedError, Collectives
from common.engine.drafter import Advance, Drafter, num_accepted
from common.engine.model import Model, Output
from common.engine.peers import Peer
from common.engine.push_lane import PushTask
from common.engine.pusher import Pusher
from common.engine.sampler import Draw
from common.engine.step_buffers import StepBuffers, StepInput, StepSequence
from common.engine.tensor_parallel import SAMPLING_RANK
from common.layout.bind import TokenChunk
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, SampledToken, StepDone, StepItem, StepPlan


@dataclass(kw_only=True)
class BoundSequence:
    """A sequence with memory on this rank.

    `last_token` is what the latest step sampled for it, and `last_position` where that token stands; `drafts` are guesses of what
    comes behind it. Its recurrent states are in `state_row`. `pushed_end` is where the tokens end whose KV has been handed to the
    pusher.
    """

    binding: BindSequence
    peer: Peer | None
    last_token: int = NO_TOKEN
    last_position: int = -1
    drafts: Sequence[int] = ()
    state_row: int = 0
    pushed_end: int = 0

    def __post_init__(self) -> None:
        if self.binding.push is not None:
            self.pushed_end = self.binding.push.num_cached_tokens


@dataclass(frozen=True, kw_only=True)
class _Push:
    """What a sequence has to push in this step: KV of some tokens of each full layer, and the states at the end."""

    binding: BindSequence
    peer: Peer
    grant: Grant
    chunk: TokenChunk
    states: bool
    pulled: tuple[Role, ...] = ()


class StepRunner:
    """Runs steps one after the other. `collectives` is None with one rank, `drafter` where nobody guesses.

    `depth` tokens are guessed at most: the caches have room for as many states.
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
        depth: int = 0,
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._agreement = agreement
        self._drafter = drafter
        self._depth = depth
        self._group = collectives if collectives is not None and collectives.size > 1 else None
        self._pusher = pusher
        self._clock = clock

    def run(self, plan: StepPlan, sequences: dict[int, BoundSequence], rank: int) -> StepDone:
        """Run `plan`. All ranks give the same verdict: an error on one is an error on each.

        An error of code WORKER_LOST means that the ranks can no longer agree on anything: the engine must be given up.
        """
        started_ns = self._clock.monotonic_ns()
        layer_started_ns: list[int] = []
        tokens: tuple[SampledToken, ...] = ()
        error: ErrorInfo | None = None
        try:
            tokens = self._run(plan, sequences, layer_started_ns)
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
            layer_started_ns=tuple(layer_started_ns),
            error=error,
        )

    def _run(
        self, plan: StepPlan, sequences: dict[int, BoundSequence], layer_started_ns: list[int]
    ) -> tuple[SampledToken, ...]:
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
            if (push := self._push_of(item, sequence)) is not None
        ]
        output = self._forward(step, pushes, layer_started_ns)
        for push in pushes:
            sequences[push.binding.seq].pushed_end = push.chunk.end
        drawn = [(sequence, each) for sequence, each in zip(bound, laid, strict=True) if each.num_logits]
        chosen = iter(self._sample(output.logits, drawn) if drawn else ())
        tokens = [next(chosen) if each.num_logits else [] for each in laid]
        for sequence, each, found in zip(bound, laid, tokens, strict=True):
            _move_on(sequence, each, found)
        if self._drafter is not None:
            self._draft(self._drafter, output, step, bound, laid)
        return tuple(
            SampledToken(seq=item.seq, position=sequence.last_position - len(found) + 1 + i, token_id=token)
            for item, sequence, found in zip(plan.items, bound, tokens, strict=True)
            for i, token in enumerate(found)
        )

    def _forward(self, step: StepInput, pushes: Sequence[_Push], layer_started_ns: list[int]) -> Output:
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
        bound: Sequence[BoundSequence],
        laid: Sequence[StepSequence],
    ) -> None:
        """Tell the drafter how far everybody has come, and keep its guesses."""
        advances = [
            self._advance(sequence, each, first_row)
            for sequence, each, first_row in zip(bound, laid, step.first_rows, strict=True)
        ]
        for sequence, drafts in zip(bound, drafter.advance(output.hidden, advances), strict=True):
            sequence.drafts = drafts

    def _advance(self, sequence: BoundSequence, laid: StepSequence, first_row: int) -> Advance:
        binding = sequence.binding
        # Where the cache is handed on, its new owner computes the pair of the last prompt token: it has the token behind it.
        goes_on = laid.num_logits > 0 and binding.push is None
        end = sequence.last_position if laid.num_logits else laid.start + len(laid.token_ids)
        geometry = self._buffers.geometry
        num_places = len(binding.block_ids) * geometry.block_size * geometry.dcp_size
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

        The choice at a position depends on what stands before it and on the position's random number, never on what was guessed:
        so guesses change nothing but the number of steps.
        """
        draws = [
            _draw(sequence, laid.start + len(laid.token_ids) - laid.num_logits + 1 + i)
            for sequence, laid in drawn
            for i in range(laid.num_logits)
        ]
        chosen = iter(self._agreement.choose(logits, draws))
        tokens = []
        for _, laid in drawn:
            choices = [next(chosen) for _ in range(laid.num_logits)]
            guesses = laid.token_ids[len(laid.token_ids) - laid.num_logits + 1 :]
            tokens.append(choices[: num_accepted(guesses, choices) + 1])
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
        elif len(token_ids) != item.num_tokens:
            raise InvalidValueError(
                field="num_tokens", value=item.num_tokens, rule=f"the {len(token_ids)} token ids given"
            )
        vocab_size = self._model.config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            # With several ranks, a token that belongs to none of them would pass for a vector of zeros.
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidValueError(field="token_ids", value=wrong, rule=f"0 to vocab_size - 1 ({vocab_size - 1})")
        guessed = not item.token_ids
        return StepSequence(
            slot=sequence.binding.slot,
            block_ids=sequence.binding.block_ids,
            start=item.start,
            token_ids=token_ids,
            num_logits=(len(token_ids) if guessed else 1) if item.sample else 0,
            state_row=sequence.state_row,
            checkpoints=guessed and self._depth > 0,
        )

    def _push_of(self, item: StepItem, sequence: BoundSequence) -> _Push | None:
        """What becomes ready with this step: full blocks, or everything when the prompt ends. Each token is pushed once."""
        binding = sequence.binding
        if sequence.peer is None or binding.push is None:
            return None
        end = min(item.start + item.num_tokens, sequence.binding.num_prompt_tokens)
        if not item.last_chunk:
            block_size = self._buffers.geometry.block_size
            end -= end % block_size
        end = max(end, sequence.pushed_end)
        if end == sequence.pushed_end and not item.last_chunk:
            return None
        grant = binding.push.grant
        chunk = TokenChunk(
            binding.block_ids, grant.block_ids, sequence.pushed_end, end, self._buffers.geometry.block_size
        )
        return _Push(
            binding=binding,
            peer=sequence.peer,
            grant=grant,
            chunk=chunk,
            states=item.last_chunk,
            pulled=binding.push.pulled,
        )

    def _submit(self, layer: int, pushes: Sequence[_Push]) -> None:
        """Queue all that the layer has ready in one go, so that its parts leave together."""
        now_ns = self._clock.monotonic_ns()
        paged = layer in self._model.caches.key
        tasks = [
            PushTask(
                seq=push.binding.seq,
                handoff_id=push.binding.handoff_id,
                peer=push.peer,
                grant=push.grant,
                namespace=Namespace.TARGET,
                role=role,
                layer=layer,
                chunk=push.chunk if paged else None,
                slot=push.binding.slot,
                queued_ns=now_ns,
            )
            for push in pushes
            if (push.chunk.start < push.chunk.end if paged else push.states)
            for role in ((Role.KEY, Role.VALUE) if paged else (Role.CONV, Role.SSM))
            if role not in push.pulled
        ]
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


def _draw(sequence: BoundSequence, position: int) -> Draw:
    binding = sequence.binding
    return Draw(
        sampling=binding.sampling, position=position, num_generated=max(0, position - binding.num_prompt_tokens)
    )
