"""One choice's text, from its tokens: detokenized, with stop strings cut off."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.core.detokenizer import Detokenizer
from services.router.core.stops import StopMatcher
from services.router.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What some tokens gave. `token_ids` are those that count: none after the one that completed a stop string."""

    text: str
    token_ids: tuple[int, ...]
    stopped: bool = False


class TextStream:
    """Feeds tokens through the detokenizer and the stop matcher, one at a time, so that framing makes no difference.

    Stop strings are not looked for in the text of the first `min_tokens` tokens.
    """

    def __init__(self, vocabulary: Vocabulary, *, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens that count so far."""
        self.stopped = False
        """Whether a stop string was met: what comes after is not wanted."""

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take tokens in. After a stop string this gives nothing."""
        pieces: list[str] = []
        counted = 0
        for token_id in token_ids:
            if self.stopped:
                break
            counted += 1
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if self.num_tokens <= self._min_tokens:
                pieces.append(text)
                continue
            emission = self._stops.push(text)
            pieces.append(emission.text)
            self.stopped = emission.stopped
        return TextPiece("".join(pieces), tuple(token_ids[:counted]), self.stopped)

    def finish(self) -> TextPiece:
        """Return the held-back end of the text, when no token follows. The last bytes may complete a stop string."""
        if self.stopped:
            return TextPiece("", (), stopped=True)
        rest = self._stops.push(self._detokenizer.finish())
        self.stopped = rest.stopped
        return TextPiece(rest.text + self._stops.finish(), (), self.stopped)
