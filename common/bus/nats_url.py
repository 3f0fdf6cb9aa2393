"""Where NATS is, as people write it: one URL, or several with commas between."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from common.runtime.settings import SettingsError, SettingsProblem

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_RULE: Final = "a URL of the form nats://host:port, or several with commas between"


def servers_of(text: str) -> list[str]:
    """The URLs in `text`. Raises SettingsError, by the name `nats_url`, with each that is none; it shows no password.

    The library would take any word for the name of a host, and look for that host until the time is up.
    """
    urls = [each.strip() for each in text.split(",")]
    problems = [
        SettingsProblem(key="nats_url", value=_without_credentials(url), rule=_RULE) for url in urls if not _is_url(url)
    ]
    if problems:
        raise SettingsError(problems)
    return urls


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or above 65535; an address with half of its brackets
        return False


def _without_credentials(text: str) -> str:
    before, at, after = text.rpartition("@")
    if not at:
        return text or "(empty)"
    scheme, separator, _ = before.partition("://")
    return f"{scheme}://***@{after}" if separator else f"***@{after}"
