"""The model of a slow link: when a transfer over it would have been over."""

from __future__ import annotations

import pytest

from common.dataplane.failpoints import parse_failpoints
from common.engine.transfer.link_shaper import LinkShaper

MB = 10**6


def test_a_link_that_is_not_shaped_costs_nothing() -> None:
    """A transfer is over when it is over, whatever else goes on."""
    shaper = LinkShaper(parse_failpoints("link:source=1,ms=5"))
    assert shaper.over_at(0, 0, 100 * MB, 3.0) == pytest.approx(3.0)


def test_latency_and_bytes_add_up() -> None:
    """2 ms and 50 MB at 100 MB a second."""
    shaper = LinkShaper(parse_failpoints("link:ms=2,mbs=100"))
    assert shaper.over_at(0, 0, 50 * MB, 3.0) == pytest.approx(3.502)


def test_transfers_share_a_link_and_not_another() -> None:
    """The second one over the link waits for the first one's bytes, not for its latency; over another link none waits."""
    shaper = LinkShaper(parse_failpoints("link:ms=1000,mbs=100"))
    assert shaper.over_at(0, 0, 100 * MB, 0.0) == pytest.approx(2.0)
    assert shaper.over_at(0, 0, 100 * MB, 0.5) == pytest.approx(3.0)
    assert shaper.over_at(1, 0, 100 * MB, 0.5) == pytest.approx(2.5)
    assert shaper.over_at(0, 0, 100 * MB, 10.0) == pytest.approx(12.0), "by then it is idle again"


def test_without_a_rate_there_is_only_latency() -> None:
    """Any number of bytes at once."""
    shaper = LinkShaper(parse_failpoints("link:ms=5"))
    assert shaper.over_at(0, 0, 100 * MB, 1.0) == shaper.over_at(0, 0, 1, 1.0) == pytest.approx(1.005)
