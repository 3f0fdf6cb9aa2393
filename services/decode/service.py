"""The decode worker: sets memory aside before prefill runs, takes over when the broker commits, generates to the end."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from common.bus.port import Bucket
from common.bus.rpc import Handler, RefusedError
from common.engine.port import EngineDeadError, EngineError
from common.runtime.clock import Deadline
from common.worker.core.sequence import Sequence, SequenceState
from common.worker.engine_loop import StepOutcome
from common.worker.generation import GeneratingService
from common.worker.service import WorkerParts
from common.worker.shared_calls import SharedCalls
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.handoff import (
    GRANT_SECRET_BYTES,
    CommitHandoff,
    Grant,
    PullHandoff,
    QueryParts,
    Reserved,
    ReserveDecode,
    TakenOver,
)
from contracts.rank import DrafterKind
from contracts.requests import Accepted
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole
from services.decode.core.link_refusal import refuse_unlinked
from services.decode.pulling import PullPorts, Pulls
from services.decode.sources import Sources
from services.decode.verification import CacheVerification

_NUM_CACHED_TOKENS: Final = 0
"""Of a prompt that decode has before it is computed: it keeps no prefixes."""


class _Takeover(msgspec.Struct, kw_only=True):
    """When a commit arrived, its sequence could take part in steps, its first token was sent (host monotonic ns; 0: not yet)."""

    committed_ns: int
    enqueued_ns: int
    ready_ns: int = 0
    sent_ns: int = 0


class DecodeService(GeneratingService):
    """Continues requests whose prompt was computed elsewhere."""

    role = WorkerRole.DECODE

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._takeovers: dict[str, _Takeover] = {}
        self._sources = Sources(
            parts.bus,
            parts.clock,
            parts.log,
            self.refusals,
            metrics=parts.metrics,
            group=parts.group,
            replicas=self.replicas,
        )
        self._pulls = Pulls(
            PullPorts(
                own=self.ref,
                bus=parts.bus,
                clock=parts.clock,
                log=parts.log,
                metrics=parts.metrics,
                events=self.events,
                group=parts.group,
                sources=self._sources,
                deliver=self.report,
                is_parallel=lambda: self.live.now.parallel_shard_pull,
            )
        )
        self._verification = CacheVerification(parts.clock, parts.log, parts.metrics)
        self._reserving: SharedCalls[None] = SharedCalls()

    def handlers(self) -> Mapping[str, Handler]:
        """`reserve`, `pull`, `parts` and `commit`, beside what every worker can be asked."""
        return {
            **super().handlers(),
            WorkerVerb.RESERVE: self._reserve,
            WorkerVerb.PULL: self._pull,
            WorkerVerb.PARTS: self._parts,
            WorkerVerb.COMMIT: self._commit,
        }

    def role_tasks(self, bucket: Bucket) -> dict[str, Coroutine[Any, Any, None]]:
        """Link with those who will be read from, and report and tell of what was pulled; nothing where nothing is pulled."""
        if not self.settings.pulled:
            return {}
        return {
            "sources": self._sources.run(bucket),
            "source_ticks": self._sources.run_ticks(bucket),
            "reports": self._pulls.run_reports(),
            "events": self._pulls.run_events(),
        }

    def held_handoffs(self) -> frozenset[str]:
        """See `WorkerService.held_handoffs`. A reservation that waits is about to hold memory."""
        return super().held_handoffs() | self._reserving.keys

    async def bound(self, sequence: Sequence) -> None:
        """Nothing that computes waits for memory here: it came with the reservation."""

    async def preempted(self, sequence: Sequence) -> None:
        """See `WorkerService.preempted`. Its prompt is not here: the router lets it be computed again, to go on behind its tokens."""
        await super().preempted(sequence)
        if self.table.get(sequence.handoff_id) is sequence:
            text = f"{self.settings.worker_id} had no memory left for {sequence.handoff_id}, the youngest that it generated"
            await self.finish(sequence, error=ErrorInfo(code=ErrorCode.PREEMPTED, message=text))

    async def _reserve(self, data: bytes) -> msgspec.Struct:
        command = decode(data, ReserveDecode)
        began_ns = self.clock.monotonic_ns()
        await self.check_command(command)
        known = self.table.get(command.handoff_id)
        if known is not None and command.handoff_id not in self._reserving:
            self._check_repeated(command, known)
        else:  # asked again while the first call waits or binds, both get its answer
            await self._reserving.join(command.handoff_id, partial(self._set_aside, command))
        return self._reserved(command.handoff_id, began_ns)

    def _check_repeated(self, command: ReserveDecode, known: Sequence) -> None:
        """A repeat asks for the same: memory for another prompt, or to be filled by another worker, is not what there is."""
        pull = self._pulls.get(command.handoff_id)
        is_same = (command.num_prompt_tokens, command.sampling) == (known.num_prompt_tokens, known.sampling)
        if not is_same or (pull is not None and pull.source != command.source):
            text = f"{command.handoff_id} is reserved for another prompt, other sampling or another source"
            raise RefusedError(command.handoff_id, ErrorCode.DUPLICATE, text)

    async def _set_aside(self, command: ReserveDecode) -> None:
        """Wait for memory and bind it. Raises `RefusedError`; nothing is held then."""
        self.check_new(command, command.num_prompt_tokens + command.sampling.max_tokens)
        handoff_id = command.handoff_id
        need = self.replicas.growth.first_need(command.num_prompt_tokens, command.sampling.max_tokens)
        wanted_until = Deadline.from_remaining_ms(self.clock, command.timeout_ms)
        wait_until = wanted_until.capped(self.settings.reserve_wait_s)
        if self.settings.pulled:
            await self._link(command, wait_until, wanted_until)
        placed = await self.replicas.line.wait(handoff_id, need, wait_until)
        if self.table.is_buried(handoff_id):
            if placed is not None:
                replica, memory = placed
                replica.pool.release(memory)
                self.replicas.line.serve()
            raise RefusedError(handoff_id, ErrorCode.CANCELLED, f"{handoff_id} was released while it waited for memory")
        if placed is None:
            if self.draining:
                raise RefusedError(handoff_id, ErrorCode.DRAINING, f"{self.settings.worker_id} is draining")
            raise RefusedError(handoff_id, ErrorCode.OVERLOADED, self._why_no_room(need.num_tokens))
        replica, memory = placed
        timeout_ms = wanted_until.remaining_ms
        sequence = self.new_sequence(msgspec.structs.replace(command, timeout_ms=timeout_ms), replica)
        sequence.memory = memory
        sequence.secret = secrets.token_hex(GRANT_SECRET_BYTES)
        sequence.state = SequenceState.HELD
        if self.settings.pulled:
            self._pulls.expect(sequence, command.source, self.settings.pulled)
        try:
            await replica.loop.bind(sequence)
        except EngineError as error:
            await self.end(handoff_id, tombstone=Deadline.after(self.clock, 0))
            self.replicas.line.serve()
            raise RefusedError(handoff_id, error.code, error.message) from error

    async def _link(self, command: ReserveDecode, wait_until: Deadline, wanted_until: Deadline) -> None:
        """Refuse what could not be pulled later, before memory is taken and a prompt computed for it."""
        try:
            await self._sources.linked(command.source, wait_until)
        except EngineDeadError:
            raise
        except PdmeshError as error:
            own_id, source_id = self.settings.worker_id, command.source.worker_id
            refusal = refuse_unlinked(error.info, own_id, source_id, is_late=wanted_until.passed)
            raise RefusedError(command.handoff_id, refusal.code, refusal.message) from error

    def _why_no_room(self, num_tokens: int) -> str:
        pools = [replica.pool for replica in self.replicas]
        free = ", ".join(f"{pool.num_free_blocks - pool.num_kept_blocks} and {pool.num_free_places}" for pool in pools)
        places = "slots with a staging row" if any(pool.num_staging_rows for pool in pools) else "slots"
        share = " in each replica" if len(pools) > 1 else ""
        kept = sum(pool.num_kept_blocks for pool in pools)
        growth = f", with {kept} more kept for answers that grow" if kept else ""
        line = f"; {len(self.replicas.line)} more wait in line" if self.replicas.line else ""
        ids = f"block ids of {self.info.block_tokens} tokens"
        return f"{num_tokens} tokens do not fit now: {ids} and {places} free{share}: {free}{growth}{line}"

    def _reserved(self, handoff_id: str, began_ns: int) -> Reserved:
        sequence = self.table.get(handoff_id)
        memory = None if sequence is None else sequence.memory
        if sequence is None or memory is None:
            raise RefusedError(handoff_id, ErrorCode.CANCELLED, "released while it was being reserved")
        return Reserved(
            handoff_id=sequence.handoff_id,
            grant=Grant(
                worker_id=self.settings.worker_id,
                incarnation=self.incarnation,
                dp_rank=sequence.dp_rank,
                generation=memory.generation,
                block_ids=memory.block_ids,
                slot=memory.slot,
                staging_row=memory.staging_row,
                secret=sequence.secret,
            ),
            num_cached_tokens=_NUM_CACHED_TOKENS,
            prepare_ms=(self.clock.monotonic_ns() - began_ns) / 1e6,
            pulled=self.settings.pulled,
            verify=self.settings.verify_cache,
        )

    async def _pull(self, data: bytes) -> msgspec.Struct:
        command = decode(data, PullHandoff)
        await self.check_command(command)
        sequence = self._known(command.handoff_id)
        await self._pulls.begin(command, sequence, self.replicas.of(sequence), self.info.block_size)
        return Accepted(handoff_id=command.handoff_id)

    async def _parts(self, data: bytes) -> msgspec.Struct:
        handoff_id = decode(data, QueryParts).handoff_id
        self._known(handoff_id)
        return self._pulls.answer(handoff_id)

    def _known(self, handoff_id: str) -> Sequence:
        sequence = self.table.get(handoff_id)
        if sequence is None:
            raise RefusedError(handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{handoff_id} was never reserved here")
        return sequence

    async def _commit(self, data: bytes) -> msgspec.Struct:
        command = decode(data, CommitHandoff)
        committed_ns = self.clock.monotonic_ns()
        await self.check_command(command)
        sequence = self._known(command.handoff_id)
        if not sequence.output_ids:
            pull = self._pulls.get(command.handoff_id)
            if pull is not None and not pull.is_done:
                text = f"{command.handoff_id} has not been pulled: what it needs is not here"
                raise RefusedError(command.handoff_id, ErrorCode.PROTOCOL, text)
            if command.first_token >= self.info.vocab_size or command.first_token < 0:
                rule = f"first_token: {command.first_token} is not allowed; the rule is: below {self.info.vocab_size}"
                raise RefusedError(command.handoff_id, ErrorCode.PROTOCOL, rule)
            if self.settings.verify_cache:
                await self._verification.check(command, sequence, self.replicas.of(sequence), _NUM_CACHED_TOKENS)
                if not sequence.output_ids:
                    await self.check_command(command)  # it may have been released meanwhile
                if sequence.output_ids:
                    return Accepted(handoff_id=command.handoff_id)  # the same commit, delivered once more, was faster
            sequence.num_computed = sequence.num_prompt_tokens
            sequence.num_cached_tokens = command.num_cached_tokens
            sequence.pending_token = command.first_token
            by_head = self.effective.drafter is DrafterKind.MTP
            sequence.bootstrap = by_head and command.drafts
            # A draft head guesses nothing without the whole of its cache.
            sequence.is_guessed = command.drafts or not by_head
            sequence.output_ids.append(command.first_token)
            replica = self.replicas.of(sequence)
            replica.scheduler.start(sequence)
            takeover = _Takeover(committed_ns=committed_ns, enqueued_ns=self.clock.monotonic_ns())
            self._takeovers[sequence.handoff_id] = takeover
            replica.loop.wake()
            takeover.ready_ns = self.clock.monotonic_ns()
            await self.tokens.add(sequence, (command.first_token,))
            takeover.sent_ns = self.clock.monotonic_ns()
        return Accepted(handoff_id=command.handoff_id)

    async def token_produced(self, sequence: Sequence, outcome: StepOutcome) -> None:
        """Tell the broker of the takeover once its first step has run."""
        takeover = self._takeovers.pop(sequence.handoff_id, None)
        if takeover is None:
            return
        self._pulls.taken_over(sequence.handoff_id)
        started_ns = outcome.result.started_ns
        self.report(
            TakenOver(
                handoff_id=sequence.handoff_id,
                incarnation=self.incarnation,
                prepare_ms=(takeover.enqueued_ns - takeover.committed_ns) / 1e6,
                enqueue_ms=(started_ns - takeover.enqueued_ns) / 1e6,
                total_ms=(started_ns - takeover.committed_ns) / 1e6,
                first_step_ns=started_ns,
                first_token_prepare_ms=(takeover.ready_ns - takeover.committed_ns) / 1e6,
                first_token_rpc_ms=((takeover.sent_ns or self.clock.monotonic_ns()) - takeover.ready_ns) / 1e6,
            ),
            self.deadline_of(sequence),
        )

    def leaves(self, sequence: Sequence) -> None:
        """See `WorkerService.leaves`."""
        super().leaves(sequence)
        self._takeovers.pop(sequence.handoff_id, None)

    def left(self, handoff_id: str) -> None:
        """See `WorkerService.left`. A reservation may still wait for memory."""
        super().left(handoff_id)
        self._pulls.end(handoff_id)
        self.replicas.line.drop(handoff_id)

    def released(self, *, quarantined: bool) -> None:
        """See `WorkerService.released`. Who waits for memory may have it now."""
        super().released(quarantined=quarantined)
        self.replicas.line.serve()

    async def drain(self) -> None:
        """See `WorkerService.drain`. Whoever waits for memory is better served elsewhere."""
        self.draining = True
        self.replicas.line.close()
        await super().drain()
