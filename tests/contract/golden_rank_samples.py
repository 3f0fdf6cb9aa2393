"""One sample of every message between a worker and its ranks, every field set: what the golden files hold."""

from __future__ import annotations

from typing import Final

from contracts import rank, rank_pull
from contracts.dataplane import Asked, RefusalReason
from contracts.manifest import (
    Namespace,
    Role,
)
from tests.contract.golden_parts import DECODE, ERROR, GRANT, MANIFEST, PULLED_PART, REGION, SAMPLING, SHARD

RANK_MESSAGES: Final[tuple[rank.RankCommand | rank.RankMessage, ...]] = (
    rank.StartRank(
        worker_id="decode-0",
        incarnation="i0b",
        dp_rank=1,
        dp=2,
        rank=1,
        tp=2,
        dcp=2,
        model_dir="models/tiny",
        block_size=16,
        num_blocks=64,
        num_slots=8,
        num_staging_rows=4,
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
    rank.LinkPeer(peer=DECODE, attempt=3, side=rank.PeerSide.SOURCE),
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
        push=rank.PushTarget(grant=GRANT, num_cached_tokens=16, pulled=(Role.CONV,)),
        staging_row=1,
    ),
    rank.ExtendSequences(generation=2**40 + 2, extensions=(rank.Extension(seq=9, block_ids=(7, 8)),)),
    rank.ReleaseSequences(seqs=(9, 10), generation=2**40 + 1, timeout_ms=2000),
    rank.StepPlan(
        step=5,
        items=(
            rank.StepItem(seq=9, start=32, num_tokens=2, token_ids=(17, 4), sample=True, last_chunk=True),
            rank.StepItem(seq=10, start=41, num_tokens=1, sample=True),
        ),
    ),
    rank_pull.PullShards(
        seq=9,
        lock=2,
        source=GRANT,
        roles=(Role.CONV, Role.SSM),
        num_cached_tokens=16,
        parallel=True,
        timeout_ms=5000,
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
        draft_ns=40,
        num_drafts=(3,),
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
    rank_pull.ShardPulled(rank=0, seq=9, lock=2, shard=SHARD, parts=(PULLED_PART,)),
    rank_pull.RoleMerged(rank=0, seq=9, lock=2, role=Role.CONV, merge_ms=0.5, parts=(PULLED_PART,)),
    rank_pull.PullStopped(rank=0, seq=9, lock=2, started_ns=100, ended_ns=300, error=ERROR),
    rank.DigestSequence(seq=9, side=rank.PeerSide.SOURCE, start=16, end=40),
    rank.SequenceDigests(
        rank=1,
        digests=(
            rank.CacheDigest(
                namespace=Namespace.TARGET, role=Role.CONV, layer=0, destination_rank=2, value=0x123456789ABCDEF0
            ),
        ),
    ),
    rank.RankScan(
        rank=1, seqs=(9, 10), num_queued_pushes=2, num_open_fds=20, num_memfds=1, num_pulls=1, staging_rows=(1,)
    ),
    rank.RefusedTransfers(
        rank=1,
        counts=(rank.RefusedCount(asked=Asked.WRITE, reason=RefusalReason.STALE, count=3),),
    ),
    rank.Done(rank=1, error=ERROR, indeterminate=(9,)),
)
