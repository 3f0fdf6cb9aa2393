"""However a stream of tokens is cut into frames, the client reads the same text."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.router.core.detokenizer import Detokenizer
from services.router.core.stops import StopMatcher
from services.router.core.text_stream import TextStream
from services.router.core.vocabulary import _BYTE_OF_CHAR, Vocabulary

_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
BYTES = Vocabulary(vocab={_CHAR_OF_BYTE[byte]: byte for byte in range(256)}, added={}, silent=(), vocab_size=256)
texts = st.text("abé€😀", max_size=30)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def _run(tokens: list[int], cuts: list[int], stops: list[str], min_tokens: int) -> tuple[str, tuple[int, ...], bool]:
    stream = TextStream(BYTES, stops=stops, min_tokens=min_tokens)
    bounds = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    pieces = [stream.push(tokens[start:end]) for start, end in itertools.pairwise(bounds)]
    pieces.append(stream.finish())
    return "".join(piece.text for piece in pieces), sum((piece.token_ids for piece in pieces), ()), stream.stopped


@given(texts, st.lists(st.integers(0, 200)), stop_lists, st.integers(0, 5))
def test_cuts_make_no_difference(text: str, cuts: list[int], stops: list[str], min_tokens: int) -> None:
    """Text, counted tokens and the verdict on stop strings are those of the uncut stream."""
    tokens = list(text.encode())
    assert _run(tokens, cuts, stops, min_tokens) == _run(tokens, [], stops, min_tokens)


@given(st.binary(max_size=40), st.lists(st.integers(0, 200)))
def test_any_bytes_give_what_the_whole_gives(data: bytes, cuts: list[int]) -> None:
    """Broken UTF-8 becomes the same replacement characters as for the whole at once."""
    assert _run(list(data), cuts, [], 0)[0] == data.decode("utf-8", errors="replace")


@given(st.text("abé€😀"))
def test_nothing_broken_is_ever_shown(text: str) -> None:
    """Whole text never passes through a replacement character on its way."""
    detokenizer = Detokenizer(BYTES)
    shown = [detokenizer.push(byte) for byte in text.encode()]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text


@given(texts, stop_lists)
def test_stop_strings_cut_where_a_plain_search_would(text: str, stops: list[str]) -> None:
    """The reference looks at every prefix: the first that ends with a stop string is cut before the longest such one."""
    expected, stopped = text, False
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected, stopped = text[: end - max(map(len, ending))], True
            break
    matcher = StopMatcher(stops)
    shown = ""
    for char in text:
        emission = matcher.push(char)
        shown += emission.text
        if emission.stopped:
            break
    assert (shown + ("" if stopped else matcher.finish()), emission.stopped if text else False) == (expected, stopped)
