"""Silence in a bucket with a time to live: what counts as gone, and when no such verdict is allowed."""

from common.bus.heard import HeardTable


def test_silent_keys_disappear() -> None:
    """The bucket does not tell of an expiry; an outage silences everybody, so after it there is twice the time."""
    table: HeardTable[int] = HeardTable(ttl_s=6.0)
    table.put("a", 1, 100.0)
    table.put("b", 2, 103.0)
    assert table.alive(105.0) == {"a": 1, "b": 2}
    assert table.expire(106.0) == ("a",)
    table.reconnected(107.0)
    assert table.alive(118.9) == {"b": 2}
    assert table.expire(119.0) == ("b",)
    assert table.known == {}


def test_a_sign_of_life_and_a_deletion_count_at_once() -> None:
    """A repeat is as good as a new value; who has signed off is gone without waiting, and may do so twice."""
    table: HeardTable[int] = HeardTable(ttl_s=6.0)
    table.put("a", 1, 100.0)
    table.put("a", 1, 105.0)
    assert table.expire(110.9) == ()
    table.delete("a")
    table.delete("a")
    assert table.known == {}
    assert table.expire(200.0) == ()
