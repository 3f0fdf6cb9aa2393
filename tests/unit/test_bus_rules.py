"""What the bus can carry, and which patterns cover what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus.errors import InvalidSubject, PayloadTooLarge
from common.bus.rules import check_key, check_message, check_name, check_pattern, check_subject, matches, overlaps
from contracts.codec import MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c", True),
        (">", "a", True),
        ("A.b", "a.b", False),
    ],
)
def test_patterns_cover_what_nats_says(pattern: str, subject: str, expected: bool) -> None:
    """`*` is one token, a final `>` one or more, case counts."""
    assert matches(pattern, subject) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("*.b", "a.*", True),
        ("*.b", "a.c", False),
        ("a.*.c", "a.b.*", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "b.>", False),
        ("a.>", "*.b.>", True),
        (">", "a", True),
        ("a.*", "a.b.>", False),
        ("a.*.*", "a.b.>", True),
    ],
)
def test_patterns_overlap_if_one_subject_fits_both(one: str, other: str, expected: bool) -> None:
    """Whichever comes first; wildcards on both sides count."""
    assert overlaps(one, other) is expected
    assert overlaps(other, one) is expected


def test_good_names_pass() -> None:
    """What the subject table and the buckets use."""
    check_subject("pd.v1.rpc.decode.worker-0_a.reserve")
    check_subject("$KV.PD_WORKERS.decode-0")
    check_pattern("pd.v1.ev.*.h1.>")
    check_key("decode-0")
    check_key("a/b=c.D_1")
    check_name("PD_EVENTS")
    check_message(b"", None)
    check_message(b"", {})


def test_the_size_counts_headers_as_they_travel() -> None:
    """Payload, 12 bytes for the block, and each header's name, value and 4 bytes."""
    headers = {"ab": "cde"}
    room = MAX_MESSAGE_BYTES - 12 - 2 - 3 - 4
    check_message(bytes(room), headers)
    with pytest.raises(PayloadTooLarge, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        check_message(bytes(room + 1), headers)


def test_the_error_names_value_and_rule() -> None:
    """A reader of the log knows what to change."""
    with pytest.raises(InvalidSubject, match=r"subject: 'a\.\*' is not allowed; the rule is: .*no wildcards"):
        check_subject("a.*")
    with pytest.raises(InvalidSubject, match="name: 'a'"):
        check_name("a")


@given(st.text(alphabet="ab.*> \t\n\x7f\u00e4\u2003\u200b", max_size=8))
def test_what_is_fine_at_first_sight_is_fine(subject: str) -> None:
    """The quick look lets nothing pass that the rule refuses."""
    if all(token and not set(token) & set("*> \t\n\x7f\u2003") for token in subject.split(".")):
        check_subject(subject)
    else:
        with pytest.raises(InvalidSubject):
            check_subject(subject)


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("traceparent", "00-ab", True),
        ("pd-type", "", True),
        ("a", "b c", True),
        ("a", " b", False),
        ("a", "b ", False),
        ("a", "b\r\nc: d", False),
        ("a", "\x7f", False),
        ("a", "\u00e4", False),
        ("a b", "c", False),
        ("a:", "c", False),
        ("", "c", False),
    ],
)
def test_a_header_is_a_token_and_printable_ascii(name: str, value: str, good: bool) -> None:
    """Whatever could end the line that it travels in is refused."""
    if good:
        check_message(b"", {name: value})
    else:
        with pytest.raises(InvalidSubject, match="printable ASCII"):
            check_message(b"", {name: value})
