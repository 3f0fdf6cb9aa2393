"""The verb `replay`: a router asks a worker for tokens that it may have missed."""

from __future__ import annotations

import msgspec

from common.bus.rpc import RefusedError
from common.worker.core.table import HandoffTable
from common.worker.token_stream import TokenStream
from contracts.codec import decode
from contracts.errors import ErrorCode, InvalidValueError
from contracts.requests import Accepted, ReplayTokens, TokenFrame


class Replay:
    """Answers from what the token stream keeps, and from the table for sequences that have no token yet."""

    def __init__(self, tokens: TokenStream, table: HandoffTable) -> None:
        self._tokens = tokens
        self._table = table

    async def answer(self, data: bytes) -> msgspec.Struct:
        """One frame, maybe without a token. Raises `RefusedError` for a handoff that is not known here, or not that far."""
        asked = decode(data, ReplayTokens)
        if asked.ended:
            self._tokens.forget(asked.handoff_id)
            return Accepted(handoff_id=asked.handoff_id)
        try:
            frame = self._tokens.replay(asked.handoff_id, asked.index)
        except InvalidValueError as error:
            raise RefusedError(asked.handoff_id, ErrorCode.PROTOCOL, error.message) from error
        if frame is not None:
            return frame
        sequence = self._table.get(asked.handoff_id)
        if sequence is None:
            raise RefusedError(asked.handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{asked.handoff_id} is not known here")
        return TokenFrame(
            handoff_id=sequence.handoff_id,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            index=asked.index,
        )
