"""Why two workers cannot be linked."""

from __future__ import annotations

from enum import StrEnum

from contracts.errors import ErrorCode, PdmeshError


class PlanRule(StrEnum):
    """The names of the rules that manifests must obey before any request is taken."""

    SCHEMA_VERSION = "schema_version"
    WORKER = "one_worker_a_side"
    RANKS = "each_rank_once"
    REPLICAS = "same_layout_on_all_replicas"
    FINGERPRINT = "same_settings_on_all_ranks"
    MODEL = "same_model"
    BLOCK_SIZE = "same_block_size"
    DTYPES = "same_dtypes"
    SPECULATION = "same_speculation_depth"
    CONTEXT_PARALLEL = "context_parallel_destination_only"
    TENSORS = "same_tensors"
    UNIT = "same_unit"
    GAP = "no_gap"
    OVERLAP = "no_overlap"
    OVERFLOW = "no_integer_overflow"
    BOUNDS = "inside_the_region"


class PlanRefusedError(PdmeshError):
    """Two sets of manifests break `rule`: `expected` and `actual` say how, `where` names the side, rank or tensor."""

    code = ErrorCode.INCOMPATIBLE_WORKERS

    def __init__(self, rule: PlanRule, *, where: str, expected: object, actual: object) -> None:
        super().__init__(
            f"cannot plan a transfer: rule {rule}, {where}: expected {expected}, found {actual}", param=where
        )
        self.rule = rule
        self.where = where
        self.expected = expected
        self.actual = actual
