"""What is taken for the address of a NATS server, before anybody looks for one there."""

from __future__ import annotations

import pytest

from common.bus.nats_url import servers_of
from common.runtime.settings import SettingsError


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("nats://127.0.0.1:4222", ["nats://127.0.0.1:4222"]),
        ("nats://me:word@host", ["nats://me:word@host"]),
        ("tls://[::1]:4222, wss://host:443", ["tls://[::1]:4222", "wss://host:443"]),
    ],
)
def test_urls_are_taken_apart(text: str, urls: list[str]) -> None:
    """One or several, with or without a user; the port may be left out, as NATS has one by default."""
    assert servers_of(text) == urls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("garbage", "garbage"),
        ("localhost:4222", "localhost:4222"),
        ("http://host:4222", "http://host:4222"),
        ("nats://:4222", "nats://:4222"),
        ("nats://host:port", "nats://host:port"),
        ("nats://host:65536", "nats://host:65536"),
        ("nats://[::1:4222", "nats://[::1:4222"),
        ("nats://host:4222,", "(empty)"),
        ("nats://me:word@host:port", "nats://***@host:port"),
        ("me:word@host", "***@host"),
    ],
)
def test_what_is_no_url_is_refused_by_name(text: str, shown: str) -> None:
    """The text is shown with the rule, but without a password."""
    with pytest.raises(SettingsError) as caught:
        servers_of(text)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("nats_url", shown)
    assert problem.rule.startswith("a URL of the form nats://host:port")
