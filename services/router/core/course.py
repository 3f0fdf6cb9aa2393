"""How far one request has come, over all of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from contracts.errors import PdmeshError
from contracts.requests import FinishReason, WorkerRef
from services.router.core.remainder import Remainder, end_of, remainder
from services.router.core.retry import Failures, blame
from services.router.core.text_stream import TextPiece, TextStream


class Course:
    """The tokens that have come of a `whole` request, and what became of its attempts.

    Text that is held back, stop strings that have begun and characters that are not complete go on over attempts: all tokens
    go through one stream, each once.
    """

    def __init__(
        self, whole: Remainder, stream: TextStream, *, eos_token_ids: Collection[int], redispatch: bool
    ) -> None:
        self._whole = whole
        self._stream = stream
        self._eos_token_ids = eos_token_ids
        self._redispatch = redispatch
        self._token_ids: list[int] = []
        self.attempt = 0
        """Number of the attempt that is made now, or next."""
        self.num_cached_tokens = 0
        """Tokens of the client's prompt that were cached: later attempts also find what earlier ones have computed."""
        self.failures = Failures()
        self.failure: PdmeshError | None = None
        """How the last attempt failed."""
        self.blamed: Counter[WorkerRef] = Counter()

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self._token_ids)

    @property
    def remainder(self) -> Remainder:
        """What the next attempt is asked for."""
        return remainder(self._whole, self._token_ids)

    @property
    def may_go_on(self) -> bool:
        """Whether the client allows another attempt where this one has come to."""
        return self._redispatch or not self._token_ids

    @property
    def end(self) -> FinishReason | None:
        """Why nothing can follow the tokens that have come, if that is so: also when nobody lived to say it."""
        if self._stream.stopped:
            return FinishReason.STOP
        return end_of(self._token_ids, self._whole.sampling, self._eos_token_ids)

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens; see `TextStream.push`."""
        piece = self._stream.push(token_ids)
        self._token_ids.extend(piece.token_ids)
        return piece

    def finish(self) -> TextPiece:
        """See `TextStream.finish`."""
        return self._stream.finish()

    def failed(self, error: PdmeshError, workers: Sequence[WorkerRef], *, delivered: bool) -> None:
        """Note that the attempt failed, and where; `delivered` says that tokens of its own had come. The next one has the next number."""
        self.attempt += 1
        self.failure = error
        self.failures.note(error, delivered=delivered)
        self.blamed.update(blame(error, workers))
