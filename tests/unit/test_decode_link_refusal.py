"""What a reservation or a pull is refused with when its source cannot be linked."""

from __future__ import annotations

import pytest

from contracts.errors import ErrorCode, ErrorInfo
from services.decode.core.link_refusal import refuse_unlinked


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
def test_the_request_is_tried_elsewhere_unless_its_own_time_is_over(code: ErrorCode, *, is_late: bool) -> None:
    """What can be retried keeps its name, everything else is a transfer that fails; the text says who and why."""
    error = ErrorInfo(code=code, message="it says nothing")
    refusal = refuse_unlinked(error, "decode-0", "prefill-1", is_late=is_late)
    assert refusal.message == "decode-0 cannot read from prefill-1: it says nothing"
    if is_late and code is ErrorCode.DEADLINE_EXCEEDED:
        assert refusal.code is ErrorCode.DEADLINE_EXCEEDED
    else:
        assert refusal.rule.retryable
        assert refusal.code is (code if error.rule.retryable else ErrorCode.TRANSFER_FAILED)
