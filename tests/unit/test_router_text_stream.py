"""Tokens become text: characters over several tokens, special tokens, stop strings."""

import pytest

from services.router.core.detokenizer import Detokenizer, whole_text
from services.router.core.stops import StopMatcher
from services.router.core.text_stream import TextStream
from services.router.core.vocabulary import Vocabulary

# "é" is written "Ã©" in the byte-level alphabet, a space "Ġ".
VOCAB = {"a": 0, "b": 1, "Ã": 2, "©": 3, "Ġab": 4, "<end>": 5, "<|x y|>": 6, "STOP": 7}
VOCABULARY = Vocabulary(vocab=VOCAB, added={5: "<end>", 6: "<|x y|>"}, silent={5}, vocab_size=10)


def test_a_character_comes_out_with_its_last_byte() -> None:
    """Nothing broken is shown in between."""
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.push(2), detokenizer.push(3)] == ["", "é"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    """What can never become a character is shown as U+FFFD, at the end or as soon as that is known."""
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.push(2), detokenizer.push(0), detokenizer.push(2), detokenizer.finish()] == [
        "",
        "\ufffda",
        "",
        "\ufffd",
    ]


def test_special_tokens_are_silent_and_added_ones_are_not() -> None:
    """Special tokens say nothing; other added tokens come out as written, spaces and all; unassigned ids are empty."""
    stream = TextStream(VOCABULARY)
    assert stream.push([5, 6, 9, 4]).text == "<|x y|> ab"
    assert stream.num_tokens == 4


def test_whole_text_shows_special_tokens() -> None:
    """Detokenizing for people hides nothing."""
    assert whole_text(VOCABULARY, [0, 5, 2, 3]) == "a<end>é"


def test_a_token_outside_the_byte_alphabet_is_refused() -> None:
    """A tokenizer of another kind is an error at the start, not wrong text later."""
    with pytest.raises(ValueError, match=r"token 0 \('▁the'\) is not byte-level"):
        Vocabulary(vocab={"▁the": 0}, added={}, silent=(), vocab_size=1)


def test_a_stop_string_over_tokens_is_never_shown_in_part() -> None:
    """Text that may begin a stop string waits until it is known not to."""
    stream = TextStream(VOCABULARY, stops=["bab"])
    pieces = [stream.push([token]) for token in (0, 1, 0, 0, 1, 0, 1, 0)]
    assert [piece.text for piece in pieces] == ["a", "", "", "baa", "", "", "", ""]
    assert [piece.stopped for piece in pieces] == [False] * 6 + [True] * 2
    assert stream.num_tokens == 7


def test_tokens_after_a_stop_string_do_not_count() -> None:
    """The token that completes the stop string is the last one."""
    stream = TextStream(VOCABULARY, stops=["b"])
    piece = stream.push([0, 1, 0, 0])
    assert (piece.text, piece.token_ids, piece.stopped) == ("a", (0, 1), True)
    assert stream.finish().text == ""


def test_held_back_text_comes_out_at_the_end() -> None:
    """The beginning of a stop string is ordinary text if the stream ends there."""
    stream = TextStream(VOCABULARY, stops=["ab!"])
    assert stream.push([0, 1]).text == ""
    assert stream.finish().text == "ab"


def test_stop_strings_wait_for_min_tokens() -> None:
    """In the first min_tokens tokens a stop string is ordinary text."""
    stream = TextStream(VOCABULARY, stops=["b"], min_tokens=3)
    piece = stream.push([1, 1, 0, 0, 1])
    assert (piece.text, piece.stopped) == ("bbaa", True)


def test_the_stop_string_that_ends_first_counts() -> None:
    """Of two that end together, the longer one is cut off."""
    assert StopMatcher(["abc", "b"]).push("xabc").text == "xa"
    assert StopMatcher(["b", "ab"]).push("xabc").text == "x"


def test_an_unfinished_character_may_complete_a_stop_string() -> None:
    """Text that only the end of the stream produces is looked at, too."""
    stream = TextStream(VOCABULARY, stops=["a\ufffd"])
    assert stream.push([0, 2]).text == ""
    end = stream.finish()
    assert (end.text, end.stopped) == ("", True)
