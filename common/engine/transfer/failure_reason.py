"""What is said of a failure in a thread that moves bytes: its reason, and for a mistake in the program where it was made."""

from __future__ import annotations

import logging
from typing import Final

from contracts.errors import PdmeshError

_EXPECTED: Final = (PdmeshError, OSError)
"""What peers, requests and the operating system bring about."""

_log: Final = logging.getLogger(__name__)


def reason_of(error: Exception, doing: str) -> str:
    """The text for a report of `error`, which is logged as `log_unexpected` does."""
    log_unexpected(error, doing)
    return f"{type(error).__name__}: {error}"


def log_unexpected(error: Exception, doing: str) -> None:
    """Log an error that nobody outside can cause, with its traceback and what was being done. No other one."""
    if not isinstance(error, _EXPECTED):
        _log.error("%s failed", doing, exc_info=error)
