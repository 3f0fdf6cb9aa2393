"""Running one step on one rank: agree, compute, sample, tell all ranks, push what is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.engine.collectives.port import CollectiveAbortedError, Collectives
from common.engine.model import Model
from common.engine.peers import Peer
from common.engine.push_lane import PushTask
from common.engine.pusher import Pusher
from common.engine.sampler import Draw, Sampler
from common.engine.step_buffers import StepBuffers, StepSequence
from common.engine.tensor_parallel import SAMPLING_RANK
from common.layout.bind import TokenChunk
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError, PdmeshError
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, SampledToken, StepDone, StepItem, StepPlan

NO_TOKEN: Final = -1


@dataclass(kw_only=True)
class BoundSequence:
    """A sequence with memory on this rank.

    `last_token` is what the latest step sampled for it, and `last_position` where that token stands. `pushed_end` is where the
    tokens end whose KV has been handed to the pusher.
    """

    binding: BindSequence
    peer: Peer | None
    last_token: int = NO_TOKEN
    last_position: int = -1
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
    """Runs steps one after the other. `collectives` is None with one rank."""

    def __init__(
        self,
        *,
        model: Model,
        buffers: StepBuffers,
        sampler: Sampler,
        collectives: Collectives | None,
        pusher: Pusher,
        clock: Clock,
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._sampler = sampler
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
        except _AgreedError as failure:
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
            step = self._buffers.fill(
                [self._resolve(item, sequence) for item, sequence in zip(plan.items, bound, strict=True)]
            )
        except Exception as error:  # noqa: BLE001 - one rank's failure becomes everybody's verdict
            failure = error
        self._agree(failure)
        pushes = [
            push
            for item, sequence in zip(plan.items, bound, strict=True)
            if (push := self._push_of(item, sequence)) is not None
        ]

        def on_layer_start(_: int) -> None:
            layer_started_ns.append(self._clock.monotonic_ns())

        def on_layer_written(layer: int) -> None:
            self._submit(layer, pushes)

        if pushes:
            output = self._model.forward(step, on_layer_start=on_layer_start, on_layer_written=on_layer_written)
        else:
            output = self._model.forward(step)
        for push in pushes:
            sequences[push.binding.seq].pushed_end = push.chunk.end
        drawn = [(item, sequence) for item, sequence in zip(plan.items, bound, strict=True) if item.sample]
        return self._sample(output.logits, drawn) if drawn else ()

    def _agree(self, failure: Exception | None) -> None:
        """Raise `_AgreedError` on all ranks when some rank cannot run the step; nothing has been changed then."""
        if self._group is not None:
            failed = torch.zeros(self._group.size, dtype=torch.int64)
            failed[self._group.rank] = failure is not None
            self._group.all_reduce_sum(failed)
            if failure is None and bool(failed.any()):
                raise _AgreedError(
                    f"ranks {failed.nonzero()[:, 0].tolist()} cannot run the step", code=ErrorCode.WORKER_FAILED
                )
        if failure is not None:
            raise _AgreedError(f"{type(failure).__name__}: {failure}", code=_code(failure)) from failure

    def _sample(
        self, logits: torch.Tensor | None, drawn: Sequence[tuple[StepItem, BoundSequence]]
    ) -> tuple[SampledToken, ...]:
        """Choose tokens on the sampling rank and tell the others: every rank remembers them."""
        failure: Exception | None = None
        chosen = [NO_TOKEN] * len(drawn)
        if logits is not None:
            try:
                chosen = self._sampler.sample(logits, [_draw(item, sequence) for item, sequence in drawn])
            except Exception as error:  # noqa: BLE001 - the others wait for tokens: they get the sign that there are none
                failure = error
        if self._group is not None:
            told = torch.tensor(chosen, dtype=torch.int64)
            self._group.broadcast(SAMPLING_RANK, told)
            chosen = told.tolist()
        if failure is not None:
            raise _AgreedError(f"{type(failure).__name__}: {failure}", code=_code(failure)) from failure
        if NO_TOKEN in chosen:
            raise _AgreedError("the sampling rank could not choose tokens", code=ErrorCode.WORKER_FAILED)
        tokens = []
        for token, (item, sequence) in zip(chosen, drawn, strict=True):
            sequence.last_token, sequence.last_position = token, item.start + item.num_tokens
            tokens.append(SampledToken(seq=item.seq, position=sequence.last_position, token_id=token))
        return tuple(tokens)

    def _resolve(self, item: StepItem, sequence: BoundSequence) -> StepSequence:
        """The step's tokens of one sequence; an item without token ids means the token of the step before."""
        token_ids: Sequence[int] = item.token_ids
        if not token_ids:
            if item.num_tokens != 1 or sequence.last_position != item.start:
                rule = (
                    f"1 token at {sequence.last_position}, where the last sampled token stands, or explicit token ids"
                )
                raise InvalidValueError(field="step item", value=(item.start, item.num_tokens), rule=rule)
            token_ids = (sequence.last_token,)
        if len(token_ids) != item.num_tokens:
            raise InvalidValueError(
                field="num_tokens", value=item.num_tokens, rule=f"the {len(token_ids)} token ids given"
            )
        vocab_size = self._model.config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            # With several ranks, a token that belongs to none of them would pass for a vector of zeros.
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidValueError(field="token_ids", value=wrong, rule=f"0 to vocab_size - 1 ({vocab_size - 1})")
        return StepSequence(
            slot=sequence.binding.slot,
            block_ids=sequence.binding.block_ids,
            start=item.start,
            token_ids=token_ids,
            num_logits=int(item.sample),
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


class _AgreedError(PdmeshError):
    """A failure that every rank knows of: the engine goes on."""


def _code(failure: Exception) -> ErrorCode:
    return failure.code if isinstance(failure, PdmeshError) else ErrorCode.INTERNAL


def _find(item: StepItem, sequences: dict[int, BoundSequence]) -> BoundSequence:
    sequence = sequences.get(item.seq)
    if sequence is None:
        raise InvalidValueError(field="seq", value=item.seq, rule="a bound sequence")
    return sequence


def _draw(item: StepItem, sequence: BoundSequence) -> Draw:
    position = item.start + item.num_tokens
    binding = sequence.binding
    return Draw(
        sampling=binding.sampling, position=position, num_generated=max(0, position - binding.num_prompt_tokens)
    )
