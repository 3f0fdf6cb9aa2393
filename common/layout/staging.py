"""Where the states of one sequence lie in a staging row while they are being pulled, and the copies into the row and out of it.

Each copy of the plan has a place of its own in the row, without gaps: first those of the first source rank. So a source rank's
share is one stretch, shares never overlap, and what leaves the row for the slot is moved copy by copy: CONV by its Q, K and V.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from common.layout.run import Run
from common.layout.slot_rows import bind_slot
from common.layout.templates import CopyTemplate, SlotTemplate
from contracts.manifest import PlannedPart, Role

STAGED_ROLES: Final = (Role.CONV, Role.SSM)
"""What is made of the shares of several source ranks, and merged once all are there. All else is read straight into its place."""


class _Staged(NamedTuple):
    """A copy of the plan, and where its bytes begin in a row."""

    template: SlotTemplate
    offset: int


class StagedStates:
    """The states that one destination rank gets from all ranks of a source, as they lie in a row of `row_bytes` bytes."""

    def __init__(self, templates: Iterable[CopyTemplate]) -> None:
        """`templates` are the plan's for one destination rank; only those of `STAGED_ROLES` count."""
        slots = [each for each in templates if isinstance(each, SlotTemplate) and each.part.role in STAGED_ROLES]
        slots.sort(key=lambda each: each.part.src_rank)
        self._staged: Final[list[_Staged]] = []
        end = 0
        for each in slots:
            self._staged.append(_Staged(each, end))
            end += each.nbytes
        self.row_bytes: Final = end

    def parts(self, roles: Collection[Role], src_rank: int) -> frozenset[PlannedPart]:
        """The parts of some roles from one source rank."""
        parts = (each.template.part for each in self._staged)
        return frozenset(part for part in parts if part.src_rank == src_rank and part.role in roles)

    def reads(self, parts: Collection[PlannedPart], src_slot: int, base: int) -> list[Run]:
        """The copies of some parts from `src_slot` of their source (remote) into the row at `base` (local).

        Raises `InvalidValueError` for a slot that the source does not have.
        """
        found = []
        for template, offset in self._staged:
            if template.part in parts:
                (run,) = bind_slot(template, src_slot, 0)
                found.append(_from_row(run, base + offset, run.local_offset, run.local_stride))
        return found

    def merges(self, parts: Collection[PlannedPart], dst_slot: int, base: int) -> list[Run]:
        """The copies of some parts from the row at `base` (local) into `dst_slot` of the same region (remote).

        Raises `InvalidValueError` for a slot that does not exist.
        """
        found = []
        for template, offset in self._staged:
            if template.part in parts:
                (run,) = bind_slot(template, 0, dst_slot)
                found.append(_from_row(run, base + offset, run.remote_offset, run.remote_stride))
        return found


def _from_row(run: Run, row_offset: int, offset: int, stride: int) -> Run:
    """The pieces of `run` between a row, where they follow each other, and one of its sides."""
    return Run(
        local_offset=row_offset,
        remote_offset=offset,
        length=run.length,
        count=run.count,
        local_stride=run.length,
        remote_stride=stride,
    )
