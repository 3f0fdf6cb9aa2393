"""What the samples of several messages have in common, every field set."""

from __future__ import annotations

from typing import Final

import msgspec

from contracts import handoff, pull, rank_pull, requests
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, ErrorInfo
from contracts.guesses import Guesses
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

ERROR: Final = ErrorInfo(code=ErrorCode.OVERLOADED, message="no room", param="max_tokens")
GUESSES: Final = Guesses(num_steps=30, drafted=(11, 9), accepted=(7, 3))
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
    staging_row=1,
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
    interleave=16,
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
SOURCE: Final = handoff.Grant(
    worker_id="prefill-0",
    incarnation="i0a",
    dp_rank=1,
    generation=2**41,
    block_ids=(0, 1, 7),
    slot=2,
    secret="0f0e0d0c0b0a09080706050403020100",
)
SHARD: Final = pull.ShardPull(
    source_rank=1,
    destination_rank=0,
    state=pull.ShardState.DONE,
    num_bytes=2048,
    started_ns=123,
    duration_ms=0.5,
    reason="the generation had changed",
)
PULLED_PART: Final = rank_pull.PulledPart(
    namespace=Namespace.TARGET, role=Role.CONV, layer=0, source_rank=1, ranges=((0, 1),)
)
DIGEST: Final = handoff.PartDigest(
    namespace=Namespace.TARGET,
    role=Role.CONV,
    layer=0,
    destination_rank=0,
    digest="0123456789abcdef",
)
PULL_ENDED: Final = pull.PullEnded(
    handoff_id="r1-0",
    incarnation="i0b",
    lock=2,
    wait_ms=4.75,
    merges=(pull.RoleMerge(role=Role.CONV, merge_ms=0.25),),
    total_ms=5.25,
    parallel=False,
    error=ERROR,
)
FINISHED: Final = handoff.PrefillFinished(
    handoff_id="r1-0",
    incarnation="i0a",
    first_token=17,
    finish_reason=requests.FinishReason.LENGTH,
    error=ERROR,
    num_cached_tokens=16,
    queue_ms=0.25,
    compute_ms=8.5,
    source=SOURCE,
    digests=(DIGEST,),
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
    transfer=pull.Transfer.PULL,
    shards=(SHARD,),
)

RECORD: Final = handoff.HandoffRecord(
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
    submitted_at="2029-12-31T23:59:00.000+00:00",
    traceparent=TRACE.traceparent,
    router_incarnation="i0r",
    num_delivered_tokens=3,
    grant=msgspec.structs.replace(GRANT, secret=""),
    num_cached_tokens=16,
    pulled=(Role.CONV, Role.SSM),
    verify=True,
    source=msgspec.structs.replace(SOURCE, secret=""),
    lock=pull.RequestLock(number=2, holder=DECODE, taken_at="2030-01-01T00:00:00.000+00:00"),
    shards=(SHARD,),
    progress=(
        handoff.SourceProgress(transfer=pull.Transfer.PULL, source_rank=1, num_parts=6, num_done=4, num_bytes=2048),
    ),
    first_token=17,
    num_prefill_cached_tokens=8,
    num_tokens=5,
    finish_reason=requests.FinishReason.STOP,
    error=ERROR,
)
