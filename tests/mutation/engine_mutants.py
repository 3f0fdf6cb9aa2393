"""Mistakes in what ranks compute and move, and in where caches lie."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import Mutant

_SHARED_BLOCKS: Final = ("tests/property/test_context_parallel_merge.py::test_a_logarithm_of_another_base_is_seen",)
_PULLER: Final = ("tests/unit/test_engine_puller.py",)
_VERIFIED: Final = (
    "tests/property/test_verified_runs_distribution.py::test_verified_runs_are_distributed_as_the_model_says",
)

MUTANTS: Final = (
    Mutant(
        name="merge although a shard failed",
        file="common/engine/transfer/puller.py",
        before="        if error is None:\n            self._merge(pull)\n            error = pull.error\n",
        after="        self._merge(pull)\n        error = pull.error or error\n",
        tests=_PULLER,
    ),
    Mutant(
        name="give memory back that is still being read into",
        file="common/engine/transfer/puller.py",
        before="            if not self._changed.wait_for(lambda: pull.is_over, remaining):\n                return False\n",
        after="",
        tests=_PULLER,
    ),
    Mutant(
        name="let two sequences have one staging row",
        file="common/engine/ranks/bindings.py",
        before="if binding.staging_row is not None and other.binding.staging_row == binding.staging_row:",
        after="if False:",
        tests=("tests/integration/test_engine_pull.py",),
    ),
    Mutant(
        name="push what decode pulls",
        file="common/engine/ranks/step_pushes.py",
        before="            if role not in self.pulled:",
        after="            if True:",
        tests=("tests/integration/test_worker_pull_ranks.py",),
    ),
    Mutant(
        name="take logarithms of base 2 for natural ones",
        file="common/engine/model/partial.py",
        before="NaturalLse(lse.values * _LN_2)",
        after="NaturalLse(lse.values)",
        tests=_SHARED_BLOCKS,
    ),
    Mutant(
        name="merge what saw no key",
        file="common/engine/model/partial.py",
        before="parts.cleared(~parts.lse.values.isfinite())",
        after="parts",
        tests=("tests/property/test_context_parallel_merge.py::test_nobody_has_a_key",),
    ),
    Mutant(
        name="let memory of nobody into a sum",
        file="common/engine/model/attention.py",
        before="if tile.foreign is not None:",
        after="if False:",
        tests=_SHARED_BLOCKS,
    ),
    Mutant(
        name="see as many keys as the first rank of a group",
        file="common/engine/model/attention_metadata.py",
        before="rest - self.dcp_rank * self.block_size",
        after="rest",
        tests=_SHARED_BLOCKS,
    ),
    Mutant(
        name="write every token on every rank of a group",
        file="common/engine/model/attention_metadata.py",
        before="if block % self.dcp_size == self.dcp_rank:",
        after="if block >= 0:",
        tests=_SHARED_BLOCKS,
    ),
    Mutant(
        name="answer the queries of another rank",
        file="common/engine/collectives/threads.py",
        before="part[self._rank] for part in",
        after="part[self._rank - 1] for part in",
        tests=("tests/unit/test_engine_context_group.py",),
    ),
    Mutant(
        name="accept guesses without comparing them",
        file="common/engine/drafts/drafter.py",
        before="        if draft != token:",
        after="        if draft < 0:",
        tests=_VERIFIED,
    ),
    Mutant(
        name="guess by the random numbers of another position",
        file="common/engine/drafts/mtp_drafter.py",
        before="Draw.at(each.end + 1 + depth, each",
        after="Draw.at(each.end + depth, each",
        tests=_VERIFIED,
    ),
    Mutant(
        name="draw all tokens of a position by one number",
        file="common/engine/model/race.py",
        before="np.arange(size, dtype=np.uint64)",
        after="np.zeros(size, dtype=np.uint64)",
        tests=("tests/unit/test_engine_sampler.py",),
    ),
    Mutant(
        name="look up where a run stood first",
        file="common/engine/drafts/ngram_index.py",
        before="            ends[key] = here",
        after="            ends.setdefault(key, here)",
        tests=("tests/property/test_ngram_index_against_search.py",),
    ),
    Mutant(
        name="cut a draft's heads as if they were the model's",
        file="common/layout/region.py",
        before="    num_heads = shape.num_kv_heads_of(namespace)",
        after="    num_heads = shape.num_kv_heads",
        tests=("tests/property/test_layout_block_draft.py",),
    ),
    Mutant(
        name="guess from a cache with a gap",
        file="common/engine/drafts/mtp_drafter.py",
        before="        if first > kept.end:",
        after="        if False:",
        tests=("tests/unit/test_engine_draft_handoff.py",),
    ),
    Mutant(
        name="stage a bootstrap",
        file="common/layout/staging.py",
        before=" and each.part.role in STAGED_ROLES]",
        after="]",
        tests=("tests/property/test_layout_staging.py",),
    ),
)
