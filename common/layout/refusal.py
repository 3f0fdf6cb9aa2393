"""Why two workers cannot be linked."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from contracts.errors import ErrorCode, PdmeshError
from contracts.manifest import CacheDtypes


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
    DRAFT = "same_draft"
    TRANSPORT = "same_transport"
    INTERLEAVE = "interleave_is_one_block"
    CONTEXT_PARALLEL = "context_parallel_destination_only"
    CONTEXT_GROUP = "dcp_ranks_hold_one_kv_head"
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


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One field in which two workers differ that must be equal in both. `remedy` says what to change."""

    rule: PlanRule
    field: str
    source: object
    destination: object
    remedy: str

    @property
    def text(self) -> str:
        """The field, both values, the rule and the remedy, in words."""
        return (
            f"{self.field}: {_shown(self.source)} at the prefill worker, {_shown(self.destination)} at the decode worker "
            f"(rule {self.rule}: {self.remedy})"
        )


class WorkersDifferError(PlanRefusedError):
    """Two workers differ in fields that must be equal. `rule` is that of the first one, the text names all of them."""

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        first = mismatches[0]
        super().__init__(first.rule, where=first.field, expected=first.source, actual=first.destination)
        self.mismatches: Final = tuple(mismatches)
        self.message = "; ".join(mismatch.text for mismatch in mismatches)
        self.args = (self.message,)


def _shown(value: object) -> object:
    match value:
        case CacheDtypes():
            return " ".join(f"{role}={dtype}" for role, dtype in msgspec.structs.asdict(value).items())
        case "":
            return "none"
        case _:
            return value
