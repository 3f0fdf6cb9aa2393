"""One rank of an engine: its part of the model, its caches, its sequences, and the answer to every command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.port import DataPlane, Quiescence
from common.engine.collectives.port import Collectives
from common.engine.device.cpu import CpuDevice
from common.engine.device.port import Device
from common.engine.drafts.drafting import check_drafts, make_drafter
from common.engine.drafts.handoff import draft_handoff
from common.engine.model.attention_metadata import attention_geometry
from common.engine.model.config import ModelConfig, load_config
from common.engine.model.context_group import split_context
from common.engine.model.fingerprint import checkpoint_fingerprint, draft_fingerprint
from common.engine.model.model import Model
from common.engine.model.sampler import Sampler
from common.engine.model.shard import RankShard
from common.engine.model.weights import load_weights, num_weight_bytes
from common.engine.ranks.agreement import Agreement
from common.engine.ranks.bindings import Bindings
from common.engine.ranks.cache import TORCH_DTYPES, LayerCaches
from common.engine.ranks.cache_shape import cache_shape
from common.engine.ranks.digests import Digester
from common.engine.ranks.step_buffers import StepBuffers
from common.engine.ranks.step_runner import StepRunner
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peer_table import PeerTable
from common.engine.transfer.pull_read import PullTarget
from common.engine.transfer.puller import Puller
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.pusher import Pusher
from common.engine.transfer.refusal_reports import RefusalReports
from common.layout.region import lay_out
from common.layout.staging import STAGED_ROLES
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo, InvalidValueError, PdmeshError
from contracts.manifest import Coordinates, Dtype
from contracts.rank import (
    AddPeerRank,
    BindSequence,
    DigestSequence,
    Done,
    DrafterKind,
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
    RefusedTransfers,
    ReleaseSequences,
    ScanRank,
    SequenceDigests,
    StartRank,
    StepPlan,
    StopRank,
    UnlinkPeer,
)
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import WorkerRef

DEVICES: Final = {"cpu": CpuDevice}


@dataclass(frozen=True, kw_only=True)
class RankPorts:
    """What a rank is given from outside. `emit` may be called from several threads, and must not wait without a bound."""

    collectives: Collectives | None
    data_plane: DataPlane
    clock: Clock
    emit: Callable[[PartPushed | PeerLinked | RankProgress | RefusedTransfers | PullReport], None]


def error_info(error: Exception) -> ErrorInfo:
    """An exception as it travels: ours as they are, others as internal errors that name their type."""
    if isinstance(error, PdmeshError):
        return error.info
    return ErrorInfo(code=ErrorCode.INTERNAL, message=f"{type(error).__name__}: {error}")


class Rank:
    """Made by a `StartRank`. `handle` answers every other command; one thread makes all calls.

    Raises what is wrong with the start: `InvalidValueError` for sizes, dtype, device or an illegal cut, `CheckpointError` for the
    checkpoint, `DataPlaneError` for memory.
    """

    def __init__(self, start: StartRank, ports: RankPorts) -> None:
        started_at = ports.clock.monotonic()
        self._start = start
        self._ports = ports
        device = _device(start.device)
        device.prepare_process()
        dtype = _dtype(start.dtype)
        failpoints = parse_failpoints(start.failpoints)
        folder = Path(start.model_dir)
        config = load_config(folder)
        check_drafts(start, config)
        shard = RankShard(config=config, tp_rank=start.rank, tp_size=start.tp, dcp_size=start.dcp)
        context = split_context(ports.collectives, start.dcp)
        shape = cache_shape(
            config,
            dtype=dtype,
            block_size=start.block_size,
            num_blocks=start.num_blocks,
            num_slots=start.num_slots,
            num_speculative_tokens=start.num_speculative_tokens,
            keeps_draft=start.drafter is DrafterKind.MTP,
            draft_whole=start.mtp_draft_body_tp1,
        )
        at = Coordinates(
            dp_rank=start.dp_rank,
            dp_size=start.dp,
            tp_rank=start.rank,
            tp_size=start.tp,
            dcp_rank=shard.dcp_rank,
            dcp_size=start.dcp,
        )
        region_map = lay_out(shape, at, start.num_staging_rows)
        self._progress("weights", 0)
        weights = load_weights(folder, shard, TORCH_DTYPES[dtype])
        self._progress("caches", 1)
        self._region = ports.data_plane.allocate(region_map.nbytes, start.num_blocks + start.num_slots)
        self._caches = LayerCaches(region_map, self._region.data)
        self._refusals = RefusalReports(start.rank, ports.data_plane.refusals, ports.emit)
        self._peers = PeerTable(start.rank, ports.data_plane, ports.clock, self._linked)
        faults, shaper = PushFaults(failpoints, ports.data_plane), LinkShaper(failpoints)
        self._pusher = Pusher(
            rank=start.rank,
            region=self._region,
            clock=ports.clock,
            emit=ports.emit,
            faults=faults,
            shaper=shaper,
        )
        self._puller = Puller(rank=start.rank, clock=ports.clock, emit=ports.emit, faults=faults, shaper=shaper)
        self._bindings = Bindings(start, self._region, self._caches, self._peers)
        geometry = attention_geometry(shard, start.block_size)
        model = Model(shard, weights, self._caches, ports.collectives, device, context=context)
        agreement = Agreement(Sampler(config.eos_token_ids), ports.collectives)
        self._drafter = make_drafter(
            start,
            model,
            self._caches,
            collectives=ports.collectives,
            context=context,
            agreement=agreement,
            device=device,
            dtype=TORCH_DTYPES[dtype],
        )
        handoff = draft_handoff(self._drafter, self._caches)
        self._steps = StepRunner(
            model=model,
            buffers=StepBuffers(
                geometry,
                max_tokens=start.max_step_tokens,
                max_sequences=start.max_step_sequences,
                device=device.torch_device,
            ),
            agreement=agreement,
            collectives=ports.collectives,
            pusher=self._pusher,
            clock=ports.clock,
            drafter=self._drafter,
            draft_handoff=handoff,
            depth=start.num_speculative_tokens,
        )
        fingerprint = checkpoint_fingerprint(folder, config)
        self.started: Final = RankStarted(
            rank=start.rank,
            pid=os.getpid(),
            manifest=region_map.manifest(
                worker_id=start.worker_id,
                incarnation=start.incarnation,
                model=fingerprint,
                draft=draft_fingerprint(fingerprint) if start.drafter is DrafterKind.MTP else "",
            ),
            region=self._region.descriptor,
            num_weight_bytes=num_weight_bytes(weights, None if handoff is None else handoff.weights),
            num_region_bytes=region_map.nbytes,
            load_ms=(ports.clock.monotonic() - started_at) * 1000,
        )
        self._digester = Digester(start.rank, self.started.manifest, shape, self._region.data)
        self._config: ModelConfig = config
        self._progress("ready", 2)

    def handle(self, command: RankCommand) -> RankAnswer:
        """Answer one command. What goes wrong is in the answer; nothing is raised for a command that is merely refused."""
        if isinstance(command, StepPlan):
            return self._steps.run(command, self._bindings.sequences, self._start.rank)
        try:
            return self._answer(command)
        except Exception as error:  # noqa: BLE001 - every command is answered, and the answer carries the error
            return Done(rank=self._start.rank, error=error_info(error))

    def close(self) -> None:
        """End the pusher and the puller, let go of peers and memory. Idempotent."""
        self._pusher.end()  # nothing more begins
        self._peers.close()  # what is being written to them, or read from them, ends soon
        self._pusher.close()
        self._puller.close()
        if self._ports.collectives is not None:
            self._ports.collectives.close()
        self._region.close()
        self._ports.data_plane.close()
        self._refusals.close()

    def _answer(self, command: RankCommand) -> RankAnswer:
        done = Done(rank=self._start.rank)
        match command:
            case BindSequence():
                self._bindings.bind(command)
            case ExtendSequences():
                self._bindings.extend(command)
            case ReleaseSequences():
                return self._release(command)
            case DigestSequence():
                return self._digest(command)
            case AddPeerRank():
                self._peers.add(command)
            case LinkPeer():
                self._peers.link(command.peer, command.attempt, command.side)
            case PullShards():
                self._pull(command)
            case UnlinkPeer():
                self._peers.unlink(command.peer)
            case ScanRank():
                return self._scan()
            case StartRank():
                raise InvalidValueError(field="start_rank", value=command.rank, rule="the first message, once")
            case StopRank() | StepPlan():
                raise InvalidValueError(field="command", value=type(command).__name__, rule="not one for this method")
            case _:
                assert_never(command)
        return done

    def _linked(self, peer: WorkerRef, attempt: int, error: Exception | None) -> None:
        info = None if error is None else error_info(error)
        self._ports.emit(PeerLinked(rank=self._start.rank, peer=peer, attempt=attempt, error=info))

    def _progress(self, phase: str, done: int) -> None:
        self._ports.emit(RankProgress(rank=self._start.rank, phase=phase, done=done, total=2))

    def _pull(self, command: PullShards) -> None:
        sequence = self._bindings.find(command.seq)
        grant = command.source
        worker = WorkerRef(worker_id=grant.worker_id, incarnation=grant.incarnation)
        source = self._peers.find_source(worker, grant.dp_rank)
        row, row_base = sequence.binding.staging_row, 0
        if any(role in STAGED_ROLES for role in command.roles):
            if row is None:
                rule = f"one of its own for sequence {command.seq}, to pull states"
                raise InvalidValueError(field="staging_row", value=row, rule=rule)
            row_base = self._caches.region_map.staging.base(row)
        self._puller.begin(
            PullTarget(
                command=command,
                binding=sequence.binding,
                source=source,
                region=self._region,
                row_base=row_base,
                block_size=self._start.block_size,
            )
        )

    def _digest(self, command: DigestSequence) -> SequenceDigests:
        sequence = self._bindings.find(command.seq)
        num_held = len(sequence.binding.block_ids) * self._start.block_size * self._start.dcp
        if not 0 <= command.start <= command.end <= num_held:
            rule = "0 <= start <= end, within the sequence's blocks"
            raise InvalidValueError(field="tokens", value=(command.start, command.end), rule=rule)
        if command.side is PeerSide.DESTINATION:
            digests = self._digester.held(sequence.binding, command.start, command.end)
        elif sequence.peer is None:
            raise InvalidValueError(
                field="side", value=command.side, rule="destination, for a sequence without a push target"
            )
        else:
            digests = self._digester.sent(sequence.binding, sequence.peer, command.start, command.end)
        return SequenceDigests(rank=self._start.rank, digests=digests)

    def _release(self, command: ReleaseSequences) -> Done:
        deadline = self._ports.clock.monotonic() + command.timeout_ms / 1000
        sequences = self._bindings.sequences
        held = [sequences[seq] for seq in command.seqs if seq in sequences]
        self._pusher.drop(command.seqs)
        self._puller.drop(command.seqs)
        indeterminate = []
        for sequence in held:
            binding = sequence.binding
            cells = self._bindings.cells(binding)
            quiescence = self._region.revoke(cells, cells[-1], command.generation, deadline)
            # What is being read here must stay as it is: another sequence's content would arrive under this one's name. And
            # what is still being pulled would arrive in somebody else's memory.
            is_idle = self._pusher.wait_idle(binding.seq, deadline) and self._puller.wait_idle(binding.seq, deadline)
            if quiescence is Quiescence.YES and is_idle:
                del sequences[binding.seq]
                if self._drafter is not None:
                    self._drafter.forget(binding.seq)
            else:
                indeterminate.append(binding.seq)
        return Done(rank=self._start.rank, indeterminate=tuple(indeterminate))

    def _scan(self) -> RankScan:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                links.append(str(entry.readlink()))
            except OSError:  # the one that listed the folder
                continue
        return RankScan(
            rank=self._start.rank,
            seqs=tuple(sorted(self._bindings.sequences)),
            num_queued_pushes=self._pusher.num_queued,
            num_open_fds=len(links),
            num_memfds=sum("memfd:" in link for link in links),
            num_pulls=self._puller.num_pulls,
            staging_rows=self._bindings.staging_rows,
        )


def _device(name: str) -> Device:
    adapter = DEVICES.get(name)
    if adapter is None:
        raise InvalidValueError(field="device", value=name, rule=f"one of {', '.join(DEVICES)}")
    return adapter()


def _dtype(name: str) -> Dtype:
    try:
        return Dtype(name)
    except ValueError as error:
        raise InvalidValueError(field="dtype", value=name, rule=f"one of {', '.join(Dtype)}") from error
