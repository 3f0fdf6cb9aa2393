"""Prompts on their way in: frames of token ids, put together and checked. Pure; bounded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import sys
from array import array
from dataclasses import dataclass, field
from typing import Final

from common.worker.core.unclaimed import UNCLAIMED_S, Unclaimed
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.requests import PromptFrame

_ID_BYTES: Final = 4


@dataclass(slots=True)
class _Partial:
    num_frames: int
    num_prompt_tokens: int
    prompt_hash: str
    deadline: float
    heard_at: float
    ask_at: float
    frames: dict[int, bytes] = field(default_factory=dict)


class PromptBuffer:
    """Prompts that have not been asked to run yet, at most `max_tokens` of them in all.

    Over that bound a frame is refused with OVERLOADED; prompts that nobody ran by their deadline are dropped, and what lies here for a
    while is to be asked about.
    """

    def __init__(self, *, max_tokens: int, vocab_size: int) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._prompts: dict[str, _Partial] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens that room is kept for."""
        return self._num_tokens

    def add(self, frame: PromptFrame, now: float) -> None:
        """Keep a frame; a repeat changes nothing. Raises `InvalidValueError`, or OVERLOADED without room."""
        try:
            data = base64.b64decode(frame.ids_b64, validate=True)
        except binascii.Error as error:
            raise InvalidValueError(field="ids_b64", value=frame.ids_b64[:16], rule=f"base64 ({error})") from error
        partial = self._prompts.get(frame.handoff_id)
        if partial is None:
            partial = self._open(frame, now)
        shape = (frame.num_frames, frame.num_prompt_tokens, frame.prompt_hash)
        if shape != (partial.num_frames, partial.num_prompt_tokens, partial.prompt_hash):
            raise InvalidValueError(field="frame", value=shape, rule="all frames of a prompt say the same of it")
        if not 0 <= frame.index < frame.num_frames:
            raise InvalidValueError(
                field="index", value=frame.index, rule=f"0 to num_frames - 1 = {frame.num_frames - 1}"
            )
        held = sum(len(each) for index, each in partial.frames.items() if index != frame.index)
        if held + len(data) > _ID_BYTES * frame.num_prompt_tokens:
            raise InvalidValueError(
                field="ids_b64",
                value=f"{held + len(data)} bytes",
                rule=f"{_ID_BYTES} bytes for each of num_prompt_tokens",
            )
        partial.frames.setdefault(frame.index, data)
        partial.heard_at, partial.ask_at = now, now + UNCLAIMED_S

    def take(self, handoff_id: str, prompt_hash: str) -> tuple[int, ...]:
        """Remove a prompt and return its ids. Raises when it is incomplete, or not what its length and hash say."""
        partial = self._prompts.get(handoff_id)
        if partial is None or len(partial.frames) < partial.num_frames:
            have = 0 if partial is None else len(partial.frames)
            raise PdmeshError(f"the prompt of {handoff_id} has not arrived: {have} frames", code=ErrorCode.PROTOCOL)
        self.drop(handoff_id)
        data = b"".join(partial.frames[index] for index in range(partial.num_frames))
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != _ID_BYTES * partial.num_prompt_tokens or digest != partial.prompt_hash or digest != prompt_hash:
            raise PdmeshError(
                f"the prompt of {handoff_id} is not the one announced: {len(data)} bytes, sha256 {digest}",
                code=ErrorCode.PROTOCOL,
            )
        ids = array("I")
        ids.frombytes(data)
        if sys.byteorder == "big":
            ids.byteswap()
        if max(ids) >= self._vocab_size:
            raise InvalidValueError(field="prompt", value=max(ids), rule=f"token ids below {self._vocab_size}")
        return tuple(ids)

    def drop(self, handoff_id: str) -> None:
        """Forget a prompt. Unknown ones are no error."""
        partial = self._prompts.pop(handoff_id, None)
        if partial is not None:
            self._num_tokens -= partial.num_prompt_tokens

    def expire(self, now: float) -> None:
        """Drop every prompt whose deadline has passed."""
        for handoff_id in [key for key, partial in self._prompts.items() if partial.deadline <= now]:
            self.drop(handoff_id)

    def take_unclaimed(self, now: float, *, limit: int) -> tuple[Unclaimed, ...]:
        """The prompts to be asked about now, at most `limit`: those that have been due for longest come first.

        A prompt is due `UNCLAIMED_S` behind the last frame that came of it, and again as long after each time that it was taken here.
        """
        due = [(partial.ask_at, handoff_id) for handoff_id, partial in self._prompts.items() if partial.ask_at <= now]
        taken = []
        for _, handoff_id in heapq.nsmallest(limit, due):
            partial = self._prompts[handoff_id]
            partial.ask_at = now + UNCLAIMED_S
            taken.append(Unclaimed(handoff_id=handoff_id, heard_at=partial.heard_at, deadline=partial.deadline))
        return tuple(taken)

    def is_still(self, unclaimed: Unclaimed) -> bool:
        """Whether that prompt is here, and nothing more has come of it."""
        partial = self._prompts.get(unclaimed.handoff_id)
        return partial is not None and partial.heard_at == unclaimed.heard_at

    def _open(self, frame: PromptFrame, now: float) -> _Partial:
        if not 1 <= frame.num_frames <= frame.num_prompt_tokens:
            raise InvalidValueError(
                field="num_prompt_tokens",
                value=frame.num_prompt_tokens,
                rule=f"1 or more, in 1 or more frames and at least one a frame, of which there are {frame.num_frames}",
            )
        if self._num_tokens + frame.num_prompt_tokens > self._max_tokens:
            raise PdmeshError(
                f"prompts that wait hold {self._num_tokens} tokens; at most {self._max_tokens} fit",
                code=ErrorCode.OVERLOADED,
            )
        partial = _Partial(
            num_frames=frame.num_frames,
            num_prompt_tokens=frame.num_prompt_tokens,
            prompt_hash=frame.prompt_hash,
            deadline=now + frame.timeout_ms / 1000,
            heard_at=now,
            ask_at=now + UNCLAIMED_S,
        )
        self._prompts[frame.handoff_id] = partial
        self._num_tokens += frame.num_prompt_tokens
        return partial
