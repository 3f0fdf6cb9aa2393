"""From a checked request to its answer: expanded into jobs, generated side by side, written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from contracts import ids
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from services.router.account import ACCOUNT_KEY, Account
from services.router.admission import Admission
from services.router.answering import Answer, CollectedAnswer, StreamedAnswer
from services.router.core.answers import AnswerWriter
from services.router.core.parameters import Ask, choose_max_tokens
from services.router.core.placement import largest_sequence
from services.router.core.prompt_frames import pack_ids, prompt_hash
from services.router.core.remainder import Remainder
from services.router.core.usage import UsageMeter
from services.router.dispatch import Job
from services.router.fleet import Fleet
from services.router.generation import Generator, Progress
from services.router.interruption import Interruptible, SlowReaderError
from services.router.model_directory import Model
from services.router.settings import RouterSettings

_SEED_BYTES: Final = 8
_SEED_BITS: Final = 63

Encode = Callable[[], Awaitable[Sequence[tuple[int, ...]]]]
"""Gives the token ids of the prompts of a request. Called once the request has been let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completer:
    """Serves HTTP requests to generate. `entropy` gives random bytes, for ids and for seeds that nobody chose.

    `on_ended` hears of each choice that had tokens, when it is over: it had a place at the workers, which is another's now.
    """

    settings: RouterSettings
    model: Model
    fleet: Fleet
    admission: Admission
    generator: Generator
    clock: Clock
    log: Log
    entropy: Callable[[int], bytes]
    on_ended: Callable[[], None]

    async def answer(
        self, request: web.Request, ask: Ask, encode: Encode, *, num_prompts: int, chat: bool
    ) -> web.StreamResponse:
        """Return the complete answer; a stream has been sent by then. The request has an account, in which its body was read.

        Raises `PdmeshError` for what is refused or fails before anything was sent, CancelledError when the client goes.
        """
        num_choices = num_prompts * ask.n
        if num_choices > self.settings.max_choices:
            rule = f"prompts times n is at most {self.settings.max_choices}"
            raise InvalidValueError(field="n", value=ask.n, rule=rule)
        with self.admission.enter(num_choices):
            return await self._answer(request, ask, await encode(), chat=chat)

    async def _answer(
        self, request: web.Request, ask: Ask, prompts: Sequence[tuple[int, ...]], *, chat: bool
    ) -> web.StreamResponse:
        account = request[ACCOUNT_KEY]
        jobs = self._jobs(ask, prompts)
        num_prompt_tokens = sum(map(len, prompts))
        meter = UsageMeter(num_prompt_tokens=num_prompt_tokens)
        writer = AnswerWriter(
            id=jobs[0].request_id,
            created=int(self.clock.wall_time()),
            model=self.model.name,
            chat=chat,
            return_token_ids=ask.return_token_ids,
        )
        answer: Answer = (
            StreamedAnswer(request, writer, ask, meter, slow_reader_s=self.settings.slow_reader_s)
            if ask.stream
            else CollectedAnswer(writer, meter, num_choices=len(jobs))
        )
        account.prepared(
            jobs[0].request_id, num_prompt_tokens=num_prompt_tokens, num_choices=len(jobs), streamed=ask.stream
        )
        deadline = Deadline(self.clock, account.since + self.settings.request_timeout_s)

        async def serve(choice: int, job: Job) -> None:
            async def sink(progress: Progress) -> None:
                meter.add_tokens(len(progress.token_ids))
                account.delivered(choice, len(progress.token_ids), progress.finish_reason)
                if choice % ask.n == 0:
                    meter.note_cached(choice // ask.n, progress.num_cached_tokens)
                await answer.take(choice, progress)

            try:
                await self.generator.run(job, deadline, sink, scope)
            finally:
                if account.choices[choice].num_tokens:
                    self.on_ended()

        scope = Interruptible(deadline)
        try:
            with self.admission.interruptible(scope):
                async with scope, asyncio.TaskGroup() as group:
                    for choice, job in enumerate(jobs):
                        group.create_task(serve(choice, job), name=f"choice-{job.request_id}")
        except PdmeshError as error:
            return await self._failed(answer, error, account)
        except BaseExceptionGroup as group_error:
            return await self._failed(answer, self._reason(group_error, scope), account)
        try:
            return await answer.finish()
        except SlowReaderError as error:
            return await self._failed(answer, error, account)

    def _jobs(self, ask: Ask, prompts: Sequence[tuple[int, ...]]) -> list[Job]:
        """Expand prompts and `n` into requests of ours. Raises `PdmeshError` for what fits nowhere."""
        limit = self.model.max_sequence_tokens
        largest = largest_sequence(self.fleet.view(), model=self.model.name)
        if largest is not None:
            limit = min(limit, largest)
        seed = ask.seed
        if seed is None:
            seed = int.from_bytes(self.entropy(_SEED_BYTES), "little") >> (8 * _SEED_BYTES - _SEED_BITS)
        jobs: list[Job] = []
        for prompt in prompts:
            max_tokens = choose_max_tokens(
                ask.max_tokens,
                num_prompt_tokens=len(prompt),
                limit=limit,
                default=self.settings.default_max_tokens,
                field=ask.max_tokens_field,
            )
            packed = pack_ids(prompt)
            digest = prompt_hash(packed)
            jobs += [
                Job(
                    request_id=ids.request_id(self.entropy(ids.ENTROPY_BYTES)),
                    whole=Remainder(
                        packed=packed,
                        digest=digest,
                        sampling=ask.sampling(max_tokens=max_tokens, seed=seed, choice=choice),
                    ),
                    stops=ask.stops,
                    redispatch=ask.redispatch,
                )
                for choice in range(ask.n)
            ]
        return jobs

    async def _failed(self, answer: Answer, error: PdmeshError, account: Account) -> web.StreamResponse:
        """Tell the client inside the stream if it has begun, else leave it to the status of the answer."""
        if not answer.begun:
            raise error
        account.broke_off(error)
        if isinstance(error, SlowReaderError):
            answer.give_up()
        return await answer.fail(error.info)

    def _reason(self, group: BaseExceptionGroup[BaseException], scope: Interruptible) -> PdmeshError:
        """Return why the choices of a request failed: the first reason of ours. One choice's failure ends them all."""
        leaves = _leaves(group)
        for error in leaves:
            if isinstance(error, ConnectionResetError):
                raise error
        for error in leaves:
            if isinstance(error, PdmeshError):
                return scope.reason or error
        self.log.error("generation_crashed", error=repr(leaves[0]), exc_info=leaves[0])
        return PdmeshError("something went wrong inside the server", code=ErrorCode.INTERNAL)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
