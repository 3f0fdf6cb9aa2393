"""The engine port over a group of ranks: sends each command to all, gathers one answer of each, gives one verdict."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from common.engine.model.config import load_config
from common.engine.port import EngineDeadError, EngineError, EngineInfo, PullResult, Refused, StepResult
from common.engine.ranks.channels import RankChannels
from common.engine.ranks.digests import add_up
from common.engine.ranks.launch import Launcher, RankHandle
from common.engine.ranks.link_reports import Linking
from common.runtime.clock import SystemClock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError, PdmeshError
from contracts.handoff import PartDigest
from contracts.rank import (
    MAX_CONNECTING,
    AddPeerRank,
    BindSequence,
    DigestSequence,
    Done,
    ExtendSequences,
    LinkPeer,
    PartPushed,
    PeerLinked,
    PeerSide,
    RankAnswer,
    RankCommand,
    RankProgress,
    RankScan,
    RankStarted,
    ReleaseSequences,
    ScanRank,
    SequenceDigests,
    StartRank,
    StepDone,
    StepPlan,
    UnlinkPeer,
)
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription

AnswerT = TypeVar("AnswerT", bound=RankAnswer)


class RankGroupTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for all ranks, in seconds. A release waits for its own timeout on top of `command_s`.

    A stop takes twice `stop_s` at most, which is less than a service has for it (`common.runtime.lifecycle.CLOSE_TIMEOUT_S`).
    `link_s` is for their reports of a link, longer than `common.engine.transfer.peers.CONNECT_TIMEOUT_S` and a plan take.
    """

    start_s: float = 300.0
    command_s: float = 60.0
    link_s: float = 60.0
    step_s: float = 120.0
    stop_s: float = 2.0


class RankGroup:
    """See `common.engine.port.Engine`. `starts` are the start messages of the ranks, in rank order.

    A rank that dies, breaks the protocol, or does not answer in time makes the engine dead: every call from then on raises
    `EngineDeadError`, and so do those that wait. `stop` may be called in any state.
    """

    def __init__(
        self, starts: Sequence[StartRank], launcher: Launcher, timeouts: RankGroupTimeouts | None = None
    ) -> None:
        for number, start in enumerate(starts):
            if start.rank != number or start.tp != len(starts):
                rule = f"rank {number} of tp {len(starts)}"
                raise InvalidValueError(field=f"starts[{number}]", value=(start.rank, start.tp), rule=rule)
            if start.dcp != starts[0].dcp:
                rule = f"{starts[0].dcp}, as for rank 0"
                raise InvalidValueError(field=f"starts[{number}].dcp", value=start.dcp, rule=rule)
            if start.dp_rank != starts[0].dp_rank or not 0 <= start.dp_rank < start.dp:
                rule = f"one replica of all ranks, 0 to {start.dp - 1}"
                raise InvalidValueError(field=f"starts[{number}].dp_rank", value=start.dp_rank, rule=rule)
        if not starts:
            raise InvalidValueError(field="starts", value=starts, rule="at least one rank")
        self._starts = tuple(starts)
        self._launcher = launcher
        self._timeouts = timeouts or RankGroupTimeouts()
        self._handles: list[RankHandle] = []
        self._channels = RankChannels(len(starts), self._how_ended)
        self._stopping = False
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._attempts = count(1)
        self._manifests: tuple[RankStarted, ...] = ()

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        config = load_config(Path(self._starts[0].model_dir))
        try:
            await self._launch()
            answers = await self._ask(self._starts, RankStarted, self._timeouts.start_s)
        except BaseException:
            await self.stop()
            raise
        self._manifests = answers
        fingerprints = {answer.manifest.model for answer in answers}
        if len(fingerprints) != 1:
            await self.stop()
            raise EngineError(f"model_dir: the ranks read {len(fingerprints)} different checkpoints")
        first = self._starts[0]
        return EngineInfo(
            model_fingerprint=fingerprints.pop(),
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(config.eos_token_ids),
            max_position=config.max_position_embeddings,
            num_layers=config.num_hidden_layers,
            block_size=first.block_size,
            num_blocks=first.num_blocks,
            num_slots=first.num_slots,
            num_staging_rows=first.num_staging_rows,
            ranks=answers,
        )

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """See `Engine.link`. Of more than `MAX_CONNECTING` at a time, either way, the last wait for the first."""
        await self._link(peer, PeerSide.DESTINATION, ranks)

    async def link_source(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """See `Engine.link_source`."""
        await self._link(peer, PeerSide.SOURCE, ranks)

    async def _link(self, peer: WorkerRef, side: PeerSide, ranks: tuple[WorkerDescription, ...]) -> None:
        async with self._connecting:
            linking = self._channels.links.begin(peer, next(self._attempts))
            try:
                await self._begin_link(linking, side, ranks)
                await self._reports_of(linking)
            except EngineDeadError:
                raise
            except PdmeshError:
                # Some rank may have linked, or go on trying: all forget it alike.
                if not linking.is_given_up:
                    await self.unlink(peer)
                raise
            finally:
                self._channels.links.forget(linking)

    async def unlink(self, peer: WorkerRef) -> None:
        """See `Engine.unlink`."""
        self._channels.links.give_up(peer)
        await self._tell(UnlinkPeer(peer=peer), self._timeouts.command_s)

    async def bind(self, binding: BindSequence) -> None:
        """See `Engine.bind`."""
        answers = await self._ask([binding] * len(self._starts), Done, self._timeouts.command_s)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors and len(errors) < len(answers):
            # No rank may hold what another does not. No grant of this generation has been given out, so nobody writes.
            await self.release((binding.seq,), binding.generation, 0)
        if errors:
            self._raise_verdict(errors, len(answers))

    async def extend(self, command: ExtendSequences) -> None:
        """See `Engine.extend`."""
        await self._tell(command, self._timeouts.command_s)

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """See `Engine.release`."""
        command = ReleaseSequences(seqs=seqs, generation=generation, timeout_ms=timeout_ms)
        answers = await self._tell(command, self._timeouts.command_s + timeout_ms / 1000 * max(1, len(seqs)))
        indeterminate = frozenset(seq for answer in answers for seq in answer.indeterminate)
        self._channels.pulls.forget(seq for seq in seqs if seq not in indeterminate)
        return indeterminate

    async def pull(self, command: PullShards, observe: Callable[[PullReport], None]) -> PullResult:
        """See `Engine.pull`."""
        self._channels.check_alive()
        pulling, is_new = self._channels.pulls.begin(command, observe)
        if is_new:
            try:
                await self._tell(command, self._timeouts.command_s)
            except EngineDeadError:
                raise
            except PdmeshError as error:
                self._channels.pulls.refuse(pulling, error)
                raise
        timeout_s = command.timeout_ms / 1000 + self._timeouts.command_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(pulling.ended)
        except TimeoutError as error:
            text = f"ranks {pulling.silent_ranks()} did not say within {timeout_s:g} s what came of a pull"
            raise EngineError(text, code=ErrorCode.DEADLINE_EXCEEDED) from error

    async def step(self, plan: StepPlan) -> StepResult:
        """See `Engine.step`."""
        answers = await self._ask([plan] * len(self._starts), StepDone, self._timeouts.step_s)
        self._check(answers)
        return StepResult(
            step=plan.step,
            tokens=answers[0].tokens,
            started_ns=min(answer.started_ns for answer in answers),
            ended_ns=max(answer.ended_ns for answer in answers),
            layer_started_ns=tuple(answer.layer_started_ns for answer in answers)
            if any(answer.layer_started_ns for answer in answers)
            else (),
            draft_ns=max(answer.draft_ns for answer in answers),
            num_drafts=answers[0].num_drafts,
            failed=answers[0].failed,
        )

    async def digest(self, seq: int, side: PeerSide, start: int, end: int) -> tuple[PartDigest, ...]:
        """See `Engine.digest`."""
        command = DigestSequence(seq=seq, side=side, start=start, end=end)
        return add_up(await self._ask([command] * len(self._starts), SequenceDigests, self._timeouts.step_s))

    async def scan(self) -> tuple[RankScan, ...]:
        """See `Engine.scan`."""
        return await self._ask([ScanRank()] * len(self._starts), RankScan, self._timeouts.command_s)

    def watch_refused(self, told: Callable[[Refused], None]) -> None:
        """See `Engine.watch_refused`."""
        self._channels.refused.listen(told)

    async def next_push(self) -> PartPushed:
        """See `Engine.next_push`. Raises `EngineDeadError` when there will be none any more."""
        return await self._channels.next_push()

    async def next_progress(self) -> RankProgress:
        """See `Engine.next_progress`. Raises `EngineDeadError` when there will be none any more."""
        return await self._channels.next_progress()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._stopping:
            return
        self._stopping = True
        self._channels.dismiss()
        handles, self._handles = self._handles, []
        await asyncio.to_thread(_end, handles, self._timeouts.stop_s)
        self._channels.close()
        self._launcher.close()

    async def _launch(self) -> None:
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for _ in self._starts:
                here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.append(here)
                theirs.append(there)
            launch = asyncio.get_running_loop().run_in_executor(None, self._launcher.launch, theirs)
            try:
                self._handles = await asyncio.shield(launch)
            except asyncio.CancelledError:
                # The thread cannot be interrupted: let it end, so that `stop` finds what it started.
                self._handles = await launch
                raise
        except BaseException:
            for connection in ours:
                connection.close()
            raise
        finally:
            for connection in theirs:
                connection.close()
        self._channels.attach(ours)

    def _how_ended(self, rank: int) -> str:
        """What became of a rank. Called at an engine's end, so that a moment's wait holds nothing up."""
        return self._handles[rank].how_ended() if rank < len(self._handles) else "ended"

    async def _begin_link(self, linking: Linking, side: PeerSide, ranks: tuple[WorkerDescription, ...]) -> None:
        """Let all ranks begin an attempt; `side` is the peer's. Raises the verdict when any of them refuses."""
        peer = linking.peer
        own_side = PeerSide.SOURCE if side is PeerSide.DESTINATION else PeerSide.DESTINATION
        commands: list[RankCommand] = [
            AddPeerRank(peer=peer, side=own_side, manifest=own.manifest) for own in self._manifests
        ]
        commands += [AddPeerRank(peer=peer, side=side, manifest=rank.manifest, region=rank.region) for rank in ranks]
        commands.append(LinkPeer(peer=peer, attempt=linking.attempt, side=side))
        rounds = [[command] * len(self._starts) for command in commands]
        for answers in await self._channels.ask_in_turn(rounds, self._timeouts.command_s):
            self._check(answers)

    async def _reports_of(self, linking: Linking) -> None:
        """Wait until every rank has linked. Raises the verdict when one could not, or said nothing in time."""
        timeout_s, name = self._timeouts.link_s, linking.peer.worker_id
        try:
            async with asyncio.timeout(timeout_s):
                await linking.ended
        except TimeoutError as error:
            silent = sorted(set(range(len(self._starts))) - linking.reports.keys())
            text = f"ranks {silent} did not say within {timeout_s:g} s whether they are linked with {name}"
            raise EngineError(text, code=ErrorCode.DEADLINE_EXCEEDED) from error
        if linking.is_given_up:
            raise EngineError(
                f"{name} was unlinked, or linked anew, while it was being linked", code=ErrorCode.CANCELLED
            )
        self._check([linking.reports[rank] for rank in range(len(self._starts))])

    async def _tell(self, command: RankCommand, timeout_s: float) -> tuple[Done, ...]:
        """Send one command to all ranks; raise the verdict when any of them refuses."""
        answers = await self._ask([command] * len(self._starts), Done, timeout_s)
        self._check(answers)
        return answers

    def _check(self, answers: Sequence[RankAnswer | PeerLinked]) -> None:
        """Raise the verdict when some rank has an error."""
        errors = [
            answer.error
            for answer in answers
            if isinstance(answer, Done | StepDone | PeerLinked) and answer.error is not None
        ]
        if errors:
            self._raise_verdict(errors, len(answers))

    def _raise_verdict(self, errors: Sequence[ErrorInfo], size: int) -> None:
        """One error for all: the first rank's, and how many ranks had one when it was not all of them."""
        lost = next((error for error in errors if error.code is ErrorCode.WORKER_LOST), None)
        if lost is not None:
            self._channels.die(lost.message)
            raise EngineDeadError(lost.message)
        share = "" if len(errors) == size else f" (on {len(errors)} of {size} ranks)"
        raise EngineError(errors[0].message + share, code=errors[0].code, param=errors[0].param)

    async def _ask(self, commands: Sequence[RankCommand], kind: type[AnswerT], timeout_s: float) -> tuple[AnswerT, ...]:
        """One answer of each rank. An answer of another kind is a refused start (`Done` with an error) or a broken protocol."""
        found = await self._channels.ask(commands, timeout_s)
        answers = tuple(answer for answer in found if isinstance(answer, kind))
        if len(answers) != len(commands):
            refused = [a.error for a in found if isinstance(a, Done) and a.error is not None]
            if refused:
                self._raise_verdict(refused, len(commands))
            self._channels.die(f"a rank answered {type(commands[0]).__name__} with another kind of message")
            self._channels.check_alive()
        return answers


def _end(handles: Sequence[RankHandle], timeout_s: float) -> None:
    """Wait for all ranks, then kill those that are left and wait again. Blocks for at most twice the timeout."""
    clock = SystemClock()
    for attempt in range(2):
        deadline = clock.monotonic() + timeout_s
        alive = [handle for handle in handles if not handle.join(max(0.0, deadline - clock.monotonic()))]
        if not alive:
            return
        if attempt == 0:
            for handle in alive:
                handle.kill()
        handles = alive
