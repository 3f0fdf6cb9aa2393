"""One sample of every message, every field set. `python -m tests.contract.golden_messages` writes the golden files anew.

A golden file that changes is a change of the contract: old and new services meet during every rolling update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

import msgspec

from contracts import codec, events, handoff, leases, links, rank, requests, workers
from contracts.codec import Versioned
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, ErrorInfo
from contracts.manifest import (
    CacheDtypes,
    Coordinates,
    Dtype,
    Namespace,
    PagedPlace,
    RankManifest,
    Role,
    Segment,
    SlotPlace,
    Span,
    TensorKey,
)
from contracts.trace import TraceContext

FOLDER: Final = Path(__file__).parent / "golden"
MODULES: Final = (events, handoff, leases, links, requests, workers)

ERROR: Final = ErrorInfo(code=ErrorCode.OVERLOADED, message="no room", param="max_tokens")
PROMPT_TIMES: Final = handoff.PromptTimes(queue_ms=1.5, compute_ms=20.25)
SAMPLING: Final = requests.SamplingParams(
    max_tokens=64, seed=7, temperature=0.5, top_p=0.9, top_k=40, min_tokens=2, ignore_eos=True
)
TRACE: Final = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331")
PREFILL: Final = requests.WorkerRef(worker_id="prefill-0", incarnation="i0a")
DECODE: Final = requests.WorkerRef(worker_id="decode-0", incarnation="i0b")
ROUTE: Final = requests.DisaggregatedRoute(prefill=PREFILL, decode=DECODE)
GRANT: Final = handoff.Grant(
    worker_id="decode-0",
    incarnation="i0b",
    dp_rank=1,
    generation=2**40,
    block_ids=(4, 5, 9),
    slot=3,
    secret="000102030405060708090a0b0c0d0e0f",
)
REGION: Final = RegionDescriptor(
    transport="shm",
    peer_id="decode-0",
    incarnation="i0b",
    region_id="r0",
    base=4096,
    length=1 << 20,
    num_cells=72,
    opaque="/run/pdmesh/decode-0.sock",
)
MANIFEST: Final = RankManifest(
    worker_id="decode-0",
    incarnation="i0b",
    coordinates=Coordinates(dp_rank=1, dp_size=2, tp_rank=1, tp_size=2),
    model="0123abcd",
    block_size=16,
    dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
    num_blocks=64,
    num_slots=8,
    num_speculative_tokens=0,
    region_bytes=1 << 20,
    spans=(
        Span(
            key=TensorKey(namespace=Namespace.TARGET, role=Role.KEY, layer=3),
            start=1,
            length=1,
            place=PagedPlace(offset=0, block_stride=8192, head_bytes=8192, token_bytes=512),
        ),
        Span(
            key=TensorKey(namespace=Namespace.TARGET, role=Role.CONV, layer=0, segment=Segment.Q),
            start=64,
            length=64,
            place=SlotPlace(offset=524288, slot_stride=1536, row_stride=512, num_rows=3, moved_rows=3, unit_bytes=4),
        ),
    ),
)
REPORT: Final = handoff.PartsReport(
    handoff_id="r1-0",
    incarnation="i0a",
    source_dp_rank=1,
    source_rank=1,
    revision=3,
    parts=(
        handoff.PartDone(
            namespace=Namespace.TARGET, role=Role.KEY, layer=3, destination_rank=0, ranges=((0, 16), (32, 40))
        ),
        handoff.PartDone(namespace=Namespace.TARGET, role=Role.SSM, layer=0, destination_rank=0, ranges=((0, 1),)),
    ),
    num_bytes=4096,
    push_ms=1.25,
)

BUS_MESSAGES: Final[tuple[Versioned, ...]] = (
    requests.PromptFrame(
        handoff_id="r1-0",
        index=0,
        num_frames=2,
        num_prompt_tokens=40,
        prompt_hash="ab12",
        timeout_ms=60000,
        ids_b64="AQAAAA==",
    ),
    requests.SubmitRequest(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        route=ROUTE,
        num_prompt_tokens=40,
        prompt_hash="ab12",
        sampling=SAMPLING,
        timeout_ms=60000,
    ),
    requests.CancelRequest(
        handoff_id="r1-0", reason="a stop string was met", num_tokens=7, finish_reason=requests.FinishReason.STOP
    ),
    requests.CancelWork(handoff_id="r1-0"),
    requests.Ping(),
    requests.Pong(broker_id="broker-0", draining=False),
    requests.Accepted(handoff_id="r1-0"),
    requests.Refused(handoff_id="r1-0", error=ERROR),
    requests.ReplayTokens(handoff_id="r1-0", index=17, ended=True),
    requests.TokenFrame(
        handoff_id="r1-0",
        request_id="r1",
        attempt=1,
        index=3,
        token_ids=(17, 4),
        final=True,
        num_tokens=5,
        finish_reason=requests.FinishReason.STOP,
        error=ERROR,
        num_cached_tokens=16,
    ),
    handoff.ReserveDecode(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        incarnation="i0b",
        source=PREFILL,
        fence=1,
        num_prompt_tokens=40,
        sampling=SAMPLING,
        timeout_ms=60000,
    ),
    handoff.Reserved(handoff_id="r1-0", grant=GRANT, num_cached_tokens=16, prepare_ms=0.5),
    handoff.RunPrefill(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        incarnation="i0a",
        fence=1,
        num_prompt_tokens=40,
        prompt_hash="ab12",
        sampling=SAMPLING,
        timeout_ms=60000,
        grant=GRANT,
        num_cached_tokens=16,
    ),
    handoff.RunMixed(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        incarnation="i0c",
        fence=1,
        num_prompt_tokens=40,
        prompt_hash="ab12",
        sampling=SAMPLING,
        timeout_ms=60000,
    ),
    REPORT,
    handoff.QueryParts(handoff_id="r1-0"),
    handoff.PartsAnswer(handoff_id="r1-0", reports=(REPORT,)),
    handoff.PrefillFinished(
        handoff_id="r1-0",
        incarnation="i0a",
        first_token=17,
        finish_reason=requests.FinishReason.LENGTH,
        error=ERROR,
        num_cached_tokens=16,
        queue_ms=0.25,
        compute_ms=8.5,
    ),
    handoff.CommitHandoff(
        handoff_id="r1-0", incarnation="i0b", fence=1, first_token=17, num_cached_tokens=16, timeout_ms=59000
    ),
    handoff.TakenOver(
        handoff_id="r1-0",
        incarnation="i0b",
        prepare_ms=0.5,
        enqueue_ms=0.25,
        total_ms=0.75,
        first_step_ns=123456789,
        first_token_prepare_ms=0.5,
        first_token_rpc_ms=0.125,
    ),
    handoff.ReleaseHandoff(handoff_id="r1-0", reason="decode has taken over", tombstone_ms=65000),
    handoff.Released(handoff_id="r1-0", response_rpc_ms=0.75, prompt=PROMPT_TIMES),
    handoff.RequestEnded(
        handoff_id="r1-0",
        incarnation="i0b",
        num_tokens=64,
        finish_reason=requests.FinishReason.LENGTH,
        error=ERROR,
        prompt=PROMPT_TIMES,
    ),
    handoff.HandoffRecord(
        handoff_id="r1-0",
        request_id="r1",
        attempt=0,
        router_id="router-0",
        route=requests.MixedRoute(mixed=requests.WorkerRef(worker_id="mixed-0", incarnation="i0c")),
        state=handoff.HandoffState.FAILED,
        fence=1,
        num_prompt_tokens=40,
        prompt_hash="ab12",
        sampling=SAMPLING,
        deadline_at="2030-01-01T00:00:00.000+00:00",
        traceparent=TRACE.traceparent,
        grant=msgspec.structs.replace(GRANT, secret=""),
        num_cached_tokens=16,
        first_token=17,
        num_prefill_cached_tokens=8,
        num_tokens=5,
        finish_reason=requests.FinishReason.STOP,
        error=ERROR,
    ),
    workers.WorkerRecord(
        worker_id="prefill-0",
        incarnation="i0a",
        role=workers.WorkerRole.PREFILL,
        state=workers.WorkerState.READY,
        model="tiny",
        model_fingerprint="0123abcd",
        tp=2,
        dp=2,
        dcp=1,
        block_size=16,
        num_blocks=64,
        num_slots=8,
        max_sequence_tokens=1024,
        load=workers.WorkerLoad(
            num_free_blocks=60,
            num_free_slots=7,
            num_waiting=1,
            num_running=2,
            replicas=(
                workers.ReplicaRoom(num_free_blocks=40, num_free_slots=4),
                workers.ReplicaRoom(num_free_blocks=20, num_free_slots=3),
            ),
        ),
    ),
    leases.LeaseValue(holder="broker-0", start="0123abcd"),
    workers.DescribeWorker(rank=1),
    workers.WorkerDescription(worker_id="decode-0", incarnation="i0b", num_ranks=4, manifest=MANIFEST, region=REGION),
    workers.DescribeRefused(error=ERROR),
    workers.ScanWorker(),
    workers.WorkerScan(
        worker_id="decode-0",
        incarnation="i0b",
        handoff_ids=("r1-0",),
        rank_sequences=((1,), (1,)),
        held_blocks=(4, 5, 9),
        held_slots=(3,),
        num_prompt_buffers=0,
        num_open_fds=40,
        num_memfds=2,
        num_children=2,
        num_tasks=9,
        num_prefilled_tokens=0,
    ),
    links.LinkRecord(
        prefill=PREFILL,
        decode=DECODE,
        state=links.LinkState.REFUSED,
        since="2030-01-01T00:00:00.000000+00:00",
        rule="same_block_size",
        reason="block_size: 16 and 32",
        num_failures=2,
        topology="tp2 -> tp1",
        transport="shm",
        num_parts=20,
        token_bytes=1024,
        state_bytes=65536,
    ),
    links.LinkEvent(
        event=links.LinkEventName.LINKED,
        service="prefill",
        instance="prefill-0",
        prefill=PREFILL,
        decode=DECODE,
        at="2030-01-01T00:00:00.000000+00:00",
        at_ns=123456789,
        rule="same_block_size",
        reason="block_size: 16 and 32",
        topology="tp2 -> tp1",
        transport="shm",
        num_parts=20,
    ),
    events.HandoffEvent(
        event=events.EventName.PART_PUSHED,
        service="prefill",
        instance="prefill-0",
        handoff_id="r1-0",
        request_id="r1",
        at="2030-01-01T00:00:00.000000+00:00",
        at_ns=123456789,
        trace_id=TRACE.trace_id,
        span_id=TRACE.span_id,
        parent_span_id="00f067aa0ba902b7",
        phase="push",
        duration_ms=1.5,
        started_ns=121956789,
        prepare_ms=0.5,
        rpc_ms=0.25,
        enqueue_ms=0.125,
        total_ms=2.5,
        response_rpc_ms=0.75,
        first_token_prepare_ms=0.5,
        first_token_rpc_ms=0.125,
        num_bytes=4096,
        num_parts=1,
        num_chunks=3,
        num_tokens=40,
        layer=3,
        role="key",
        source_rank=1,
        destination_rank=0,
        source_dp_rank=1,
        destination_dp_rank=2,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        mixed_worker="mixed-0",
        finish_reason="stop",
        error=ERROR,
        missing_parts=("value of layer 3, source rank 1, destination rank 0: [0, 40)",),
        num_missing_parts=2,
    ),
)

RANK_MESSAGES: Final[tuple[rank.RankCommand | rank.RankMessage, ...]] = (
    rank.StartRank(
        worker_id="decode-0",
        incarnation="i0b",
        dp_rank=1,
        dp=2,
        rank=1,
        tp=2,
        model_dir="models/tiny",
        block_size=16,
        num_blocks=64,
        num_slots=8,
        max_step_tokens=512,
        max_step_sequences=32,
        dtype="bfloat16",
        device="cpu",
        num_speculative_tokens=0,
        collectives=rank.CollectivesKind.GLOO,
        collective_timeout_ms=20000,
        transport="shm",
        transport_dir="/run/pdmesh",
        failpoints="push.fail=1",
    ),
    rank.RankProgress(rank=1, phase="weights", done=3, total=8),
    rank.RankStarted(
        rank=1,
        pid=4321,
        manifest=MANIFEST,
        region=REGION,
        num_weight_bytes=1 << 20,
        num_region_bytes=1 << 20,
        load_ms=12.5,
    ),
    rank.AddPeerRank(peer=DECODE, side=rank.PeerSide.DESTINATION, manifest=MANIFEST, region=REGION),
    rank.LinkPeer(peer=DECODE, attempt=3),
    rank.UnlinkPeer(peer=DECODE),
    rank.BindSequence(
        seq=9,
        handoff_id="r1-0",
        generation=2**40,
        block_ids=(1, 2, 3),
        slot=2,
        secret="000102030405060708090a0b0c0d0e0f",
        num_prompt_tokens=40,
        sampling=SAMPLING,
        push=rank.PushTarget(grant=GRANT, num_cached_tokens=16),
    ),
    rank.ReleaseSequences(seqs=(9, 10), generation=2**40 + 1, timeout_ms=2000),
    rank.StepPlan(
        step=5,
        items=(
            rank.StepItem(seq=9, start=32, num_tokens=2, token_ids=(17, 4), sample=True, last_chunk=True),
            rank.StepItem(seq=10, start=41, num_tokens=1, sample=True),
        ),
    ),
    rank.ScanRank(),
    rank.StopRank(),
    rank.StepDone(
        rank=0,
        step=5,
        tokens=(rank.SampledToken(seq=9, position=40, token_id=17),),
        started_ns=100,
        ended_ns=200,
        layer_started_ns=(100, 150),
        error=ERROR,
    ),
    rank.PartPushed(
        rank=1,
        seq=9,
        handoff_id="r1-0",
        namespace=Namespace.TARGET,
        role=Role.VALUE,
        layer=3,
        destination_rank=0,
        start=16,
        end=40,
        num_bytes=4096,
        queued_ns=100,
        started_ns=150,
        done_ns=200,
        outcome=rank.PushOutcome.INDETERMINATE,
        reason="the lock was held",
    ),
    rank.PeerLinked(rank=1, peer=DECODE, attempt=3, error=ERROR),
    rank.RankScan(rank=1, seqs=(9, 10), num_queued_pushes=2, num_open_fds=20, num_memfds=1),
    rank.Done(rank=1, error=ERROR, indeterminate=(9,)),
)


def bus_kinds() -> set[type[Versioned]]:
    """Every message of the bus, as the contract modules define them."""
    found = (getattr(module, name) for module in MODULES for name in vars(module))
    return {
        kind
        for kind in found
        if isinstance(kind, type) and issubclass(kind, Versioned) and kind.__struct_config__.tag is not None
    }


def rank_kinds() -> set[type[msgspec.Struct]]:
    """Every message between a worker and its ranks."""
    return {*get_args(rank.RankCommand), *get_args(rank.RankMessage)}


def tag_of(message: msgspec.Struct) -> str:
    """The name of a message on the wire, and of its golden file."""
    return str(type(message).__struct_config__.tag)


def files() -> dict[Path, bytes]:
    """What every golden file holds: JSON for the bus, msgpack as hexadecimal text for ranks."""
    bus = {FOLDER / f"{tag_of(message)}.json": codec.encode(message) for message in BUS_MESSAGES}
    ranks = {
        FOLDER / f"{tag_of(message)}.msgpack.hex": rank.encode(message).hex().encode() for message in RANK_MESSAGES
    }
    return {path: content + b"\n" for path, content in (bus | ranks).items()}


def main() -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for path, content in files().items():
        path.write_bytes(content)


if __name__ == "__main__":
    main()
