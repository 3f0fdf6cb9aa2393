"""A prefill worker meets decode workers that guess more, less, by other drafts, or not at all: all are linked, some without drafts."""

from __future__ import annotations

import pytest

from common.engine.fake.model import fake_shape
from common.layout.region import lay_out
from contracts.manifest import Coordinates, RankManifest
from contracts.workers import WorkerDescription
from services.prefill.core.pair import Terms
from services.prefill.meeting import compare


def manifest(worker_id: str, draft: str, depth: int = 0) -> RankManifest:
    """A worker of one rank."""
    shape = fake_shape(num_blocks=8, num_slots=2, num_speculative_tokens=depth, keeps_draft=bool(draft))
    region = lay_out(shape, Coordinates())
    return region.manifest(worker_id=worker_id, incarnation="i0", model="fake", draft=draft)


def terms(ours: RankManifest, theirs: RankManifest) -> Terms:
    """What the two find when they meet."""
    described = WorkerDescription(worker_id="decode-0", incarnation="i0", num_ranks=1, manifest=theirs, region=None)
    return compare([(ours, None)], (described,)).terms


@pytest.mark.parametrize("depth", [0, 3, 8])
def test_the_same_draft_comes_along_whatever_the_depth(depth: int) -> None:
    """Its keys, values and bootstrap are parts of the handoff."""
    plain = terms(manifest("prefill-0", ""), manifest("decode-0", "", depth))
    found = terms(manifest("prefill-0", "head"), manifest("decode-0", "head", depth))
    assert (plain.has_drafts, plain.why_no_drafts) == (False, "")
    assert (found.has_drafts, found.why_no_drafts) == (True, "")
    assert found.num_parts == plain.num_parts + 3
    assert found.token_bytes > plain.token_bytes
    assert found.state_bytes > plain.state_bytes


@pytest.mark.parametrize(
    ("ours", "theirs", "remedy"),
    [
        ("", "head", "set num_speculative_tokens with drafter=mtp at the prefill worker, too"),
        ("head", "", "set num_speculative_tokens with drafter=mtp at the decode worker, too"),
        ("head", "other", "start both from a checkpoint with the same draft head"),
    ],
)
def test_another_draft_stays_behind(ours: str, theirs: str, remedy: str) -> None:
    """The pair is linked as if nobody kept a draft, and says what to change."""
    plain = terms(manifest("prefill-0", ""), manifest("decode-0", ""))
    found = terms(manifest("prefill-0", ours), manifest("decode-0", theirs))
    assert not found.has_drafts
    text = f"draft: {ours or 'none'} at the prefill worker, {theirs or 'none'} at the decode worker"
    assert found.why_no_drafts == f"{text} (rule same_draft: {remedy})"
    sizes = found.num_parts, found.token_bytes, found.state_bytes
    assert sizes == (plain.num_parts, plain.token_bytes, plain.state_bytes)
