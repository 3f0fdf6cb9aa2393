"""The run that moves the state of one sequence from slot to slot: from a template, and the slots and rows that a request has."""

from __future__ import annotations

import msgspec

from common.layout.run import Run
from common.layout.templates import SlotTemplate
from contracts.errors import InvalidValueError


def bind_slot(
    template: SlotTemplate, src_slot: int, dst_slot: int, *, src_row: int = 0, dst_row: int = 0
) -> tuple[Run, ...]:
    """The run that moves one sequence's state between two slots, from `src_row` on to `dst_row` on. Raises as `slot_bases` does."""
    src_base, dst_base = slot_bases(template, src_slot, dst_slot, src_row=src_row, dst_row=dst_row)
    run = slot_rows(template)
    return (
        msgspec.structs.replace(
            run, local_offset=run.local_offset + src_base, remote_offset=run.remote_offset + dst_base
        ),
    )


def slot_rows(template: SlotTemplate) -> Run:
    """The run that moves a state from row 0 of slot 0 to row 0 of slot 0: other slots and rows lie at other bases."""
    length, count = template.row_bytes, template.moved_rows
    src_stride, dst_stride = template.src_row_stride, template.dst_row_stride
    if count == 1 or src_stride == dst_stride == length:
        return Run(local_offset=template.src_offset, remote_offset=template.dst_offset, length=length * count)
    return Run(
        local_offset=template.src_offset,
        remote_offset=template.dst_offset,
        length=length,
        count=count,
        local_stride=src_stride,
        remote_stride=dst_stride,
    )


def slot_bases(
    template: SlotTemplate, src_slot: int, dst_slot: int, *, src_row: int = 0, dst_row: int = 0
) -> tuple[int, int]:
    """How far behind row 0 of slot 0 the rows of a sequence begin, at the source and at the destination.

    With speculation the state of a sequence begins at the row of the last accepted token (SSM: that row, CONV: three rows from
    there); without, at 0. Raises `InvalidValueError` for a slot or a row that does not exist.
    """
    _check_slot("src_slot", src_slot, template.src_num_slots)
    _check_slot("dst_slot", dst_slot, template.dst_num_slots)
    _check_rows("src_row", src_row, template.src_num_rows, template.moved_rows)
    _check_rows("dst_row", dst_row, template.dst_num_rows, template.moved_rows)
    return (
        src_slot * template.src_slot_stride + src_row * template.src_row_stride,
        dst_slot * template.dst_slot_stride + dst_row * template.dst_row_stride,
    )


def _check_slot(field: str, slot: int, count: int) -> None:
    if not 0 <= slot < count:
        raise InvalidValueError(field=field, value=slot, rule=f"0 to {count - 1}")


def _check_rows(field: str, row: int, num_rows: int, moved_rows: int) -> None:
    first = moved_rows - 1
    if row < 0 or row + first >= num_rows:
        shown = (row, row + first) if first else row
        raise InvalidValueError(field=field, value=shown, rule=f"0 to {num_rows - 1}")
