"""Token ids to text, as they come."""

import codecs
from collections.abc import Iterable

from services.router.core.vocabulary import Vocabulary


class Detokenizer:
    """Turns a stream of tokens into a stream of text, in time proportional to the new tokens.

    A character whose bytes are spread over several tokens comes out with the last of them. Bytes that can never become
    a character come out as U+FFFD, one for each maximal part, as for the whole text at once: how the stream is cut
    makes no difference.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; it may be empty."""
        return self._decoder.decode(self._vocabulary.spoken(token_id))

    def finish(self) -> str:
        """Return what is left when no token follows: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


def whole_text(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Return the text of tokens, special ones included."""
    return b"".join(vocabulary.spelled(token_id) for token_id in token_ids).decode("utf-8", errors="replace")
