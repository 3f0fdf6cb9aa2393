"""How prompts come in: frames from the router, kept until the broker asks to run them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.bus.rpc import RefusedError
from common.runtime.clock import Clock
from common.worker.core.prompts import PromptBuffer
from common.worker.core.table import HandoffTable
from contracts.codec import decode
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import RunMixed, RunPrefill
from contracts.requests import Accepted, PromptFrame


class PromptIntake:
    """Answers the verb `prompt`, and gives whole prompts out once."""

    def __init__(
        self,
        worker_id: str,
        prompts: PromptBuffer,
        table: HandoffTable,
        clock: Clock,
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        self._worker_id = worker_id
        self._prompts = prompts
        self._table = table
        self._clock = clock
        self._is_draining = is_draining

    async def take(self, data: bytes) -> msgspec.Struct:
        """Keep a frame of a prompt. Raises `RefusedError`."""
        frame = decode(data, PromptFrame)
        if self._is_draining():
            raise RefusedError(frame.handoff_id, ErrorCode.DRAINING, f"{self._worker_id} is draining")
        if not self._table.is_buried(frame.handoff_id) and self._table.get(frame.handoff_id) is None:
            try:
                self._prompts.add(frame, self._clock.monotonic())
            except PdmeshError as error:
                raise RefusedError(frame.handoff_id, error.code, error.message) from error
        return Accepted(handoff_id=frame.handoff_id)

    def prompt_of(self, command: RunPrefill | RunMixed) -> tuple[int, ...]:
        """The token ids of a prompt that has arrived and is now asked to run. Refuses one that is not as announced."""
        try:
            prompt_ids = self._prompts.take(command.handoff_id, command.prompt_hash)
        except PdmeshError as error:
            raise RefusedError(command.handoff_id, error.code, error.message) from error
        if len(prompt_ids) != command.num_prompt_tokens:
            raise RefusedError(
                command.handoff_id,
                ErrorCode.PROTOCOL,
                f"num_prompt_tokens: {command.num_prompt_tokens} is not allowed; the rule is: {len(prompt_ids)}, as sent",
            )
        return prompt_ids
