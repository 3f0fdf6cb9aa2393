"""What a reservation or a pull is refused with when its source cannot be read from. Pure."""

from __future__ import annotations

import msgspec

from contracts.errors import ErrorCode, ErrorInfo


def refuse_unlinked(error: ErrorInfo, own_id: str, source_id: str, *, is_late: bool) -> ErrorInfo:
    """Why worker `own_id` cannot read from `source_id`, given what linking with it came to.

    Whatever it was, another source may be read from: the refusal is one after which the request is tried elsewhere. Only a deadline
    stays one when the request itself `is_late`, as opposed to the wait for the link, which is much shorter.
    """
    code = error.code
    if not (error.rule.retryable or (is_late and code is ErrorCode.DEADLINE_EXCEEDED)):
        code = ErrorCode.TRANSFER_FAILED
    return msgspec.structs.replace(error, code=code, message=f"{own_id} cannot read from {source_id}: {error.message}")
