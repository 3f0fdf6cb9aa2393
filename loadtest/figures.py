"""Samples and handoffs of one kind, summed up: times, ratios between modes, gaps, bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtest.client import Sample
from loadtest.phases import Handoff
from loadtest.statistics import Spread, median, ratio, spread


class ModeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's requests of one kind, all rounds together. Times in ms, throughput in output tokens a second."""

    mode: str
    num_requests: int
    num_errors: int
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    total_ms: Spread | None
    output_tokens_per_s: float | None


class ModeRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One mode over another: ratios of medians (first over all rounds, then each round), and how many answers are equal."""

    mode: str
    over: str
    ttft: tuple[float | None, ...]
    inter_token: tuple[float | None, ...]
    total: tuple[float | None, ...]
    throughput: tuple[float | None, ...]
    num_compared: int
    num_equal: int


class GapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Handoff gaps of one kind of request: from the last push's end to the first decode step, and as a share of the median TTFT.

    `after_compute_ms` counts from the end of the prompt's compute where that is later.
    """

    num_handoffs: int
    gap_ms: Spread
    ttft_p50_ms: float
    share_p50: float | None
    share_p99: float | None
    after_compute_ms: Spread | None
    after_compute_share_p50: float | None
    overlap: Spread | None


class ByteFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one handoff moved, beside the least that it could."""

    moved: Spread
    ideal: int
    ratio: float | None
    num_parts: int


def mode_times(mode: str, samples: Sequence[Sample]) -> ModeTimes:
    """Sum up `samples`, which are of one mode and one kind."""
    good = [sample for sample in samples if not sample.error]
    return ModeTimes(
        mode=mode,
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        ttft_ms=spread([sample.ttft_ms for sample in good]),
        inter_token_ms=spread([gap for sample in good if (gap := sample.inter_token_ms) is not None]),
        total_ms=spread([sample.total_ms for sample in good]),
        output_tokens_per_s=throughput(good),
    )


def throughput(samples: Sequence[Sample]) -> float | None:
    """Output tokens a second, while requests were under way: pauses between rounds do not count. None without samples."""
    busy_ns = 0
    end_ns = 0
    for sample in sorted(samples, key=lambda each: each.sent_ns):
        busy_ns += max(0, sample.done_ns - max(sample.sent_ns, end_ns))
        end_ns = max(end_ns, sample.done_ns)
    return ratio(sum(len(sample.token_ids) for sample in samples), busy_ns / 1e9)


def mode_ratio(mode: str, over: str, samples: Sequence[Sample]) -> ModeRatio:
    """Compare two modes by their samples of one kind. Answers are compared prompt by prompt, round by round."""
    left = [sample for sample in samples if sample.mode == mode and not sample.error]
    right = [sample for sample in samples if sample.mode == over and not sample.error]
    rounds = sorted({sample.round for sample in samples})
    cuts = [
        (left, right),
        *(([s for s in left if s.round == r], [s for s in right if s.round == r]) for r in rounds),
    ]
    theirs = {(sample.round, sample.place): sample.token_ids for sample in right}
    pairs = [(s.token_ids, theirs[s.round, s.place]) for s in left if (s.round, s.place) in theirs]
    return ModeRatio(
        mode=mode,
        over=over,
        ttft=tuple(_over_medians(a, b, "ttft_ms") for a, b in cuts),
        inter_token=tuple(_over_medians(a, b, "inter_token_ms") for a, b in cuts),
        total=tuple(_over_medians(a, b, "total_ms") for a, b in cuts),
        throughput=tuple(ratio(throughput(a) or 0.0, throughput(b) or 0.0) for a, b in cuts),
        num_compared=len(pairs),
        num_equal=sum(a == b for a, b in pairs),
    )


def gap_figures(handoffs: Sequence[Handoff], samples: Sequence[Sample]) -> GapFigures | None:
    """Sum up the gaps of one kind of request; None when there are none."""
    gaps = spread([each.gap_ms for each in handoffs if each.gap_ms is not None])
    ttfts = [sample.ttft_ms for sample in samples if not sample.error]
    if gaps is None or not ttfts:
        return None
    ttft = median(ttfts)
    after = spread([each.after_compute_ms for each in handoffs if each.after_compute_ms is not None])
    return GapFigures(
        num_handoffs=gaps.count,
        gap_ms=gaps,
        ttft_p50_ms=ttft,
        share_p50=ratio(gaps.p50, ttft),
        share_p99=ratio(gaps.p99, ttft),
        after_compute_ms=after,
        after_compute_share_p50=None if after is None else ratio(after.p50, ttft),
        overlap=spread([each.overlap for each in handoffs if each.overlap is not None]),
    )


def byte_figures(handoffs: Sequence[Handoff], ideal: int) -> ByteFigures | None:
    """Sum up the bytes of one kind of request; None when there are no handoffs."""
    moved = spread([float(each.num_bytes) for each in handoffs])
    if moved is None:
        return None
    return ByteFigures(
        moved=moved, ideal=ideal, ratio=ratio(moved.p50, ideal), num_parts=max(each.num_parts for each in handoffs)
    )


def _over_medians(left: Sequence[Sample], right: Sequence[Sample], name: str) -> float | None:
    ours, theirs = ([v for s in each if (v := getattr(s, name)) is not None] for each in (left, right))
    return ratio(median(ours), median(theirs)) if ours and theirs else None
