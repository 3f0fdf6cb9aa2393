"""Waiting for a service to answer 200 on one of its HTTP paths, and telling people what it still lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from common.runtime.clock import Clock, Deadline
from contracts.errors import ErrorCode, PdmeshError

_POLL_S = 0.1
_ANSWER_S = 2.0
_REPEAT_S = 10.0


class NotReady(PdmeshError):  # noqa: N818 - a state of the service
    """It did not become ready in time. The text says what it lacked last."""

    code = ErrorCode.DEADLINE_EXCEEDED


async def wait_ready(
    url: str, *, who: str, timeout_s: float, clock: Clock, say: Callable[[str], None], detail: Callable[[], str] = str
) -> None:
    """Return once `url` answers 200. Raises NotReady after `timeout_s`. `who` is whose it is, for people.

    What it lacks is said whenever that changes, and every 10 s, followed by `detail()`.
    """
    deadline = Deadline.after(clock, timeout_s)
    said, said_at = "", clock.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        while True:
            lacking = await _ask(session, url, who)
            if lacking is None:
                return
            if deadline.passed:
                raise NotReady(f"not ready after {timeout_s:.0f} s: {lacking}{_after_comma(detail())}")
            if lacking != said or clock.monotonic() - said_at > _REPEAT_S:
                said, said_at = lacking, clock.monotonic()
                say(f"waiting: {lacking}{_after_comma(detail())}")
            await clock.sleep(_POLL_S)


async def _ask(session: aiohttp.ClientSession, url: str, who: str) -> str | None:
    """None when ready, else what is missing."""
    try:
        async with session.get(url) as response:
            if response.status == HTTPStatus.OK:
                return None
            return lacks(await response.text())
    except (aiohttp.ClientError, TimeoutError):
        return f"{who} does not answer yet"


def lacks(body: str) -> str:
    """What a 503 of a readiness path says is missing, on one line, for whichever of our services sent it."""
    try:
        content = json.loads(body)
    except ValueError:
        return " ".join(body.split()) or "nothing said"
    if isinstance(content, dict):
        for key in ("missing", "failing"):
            if content.get(key):
                value = content[key]
                return ", ".join(str(each) for each in value) if isinstance(value, list) else str(value)
        if content.get("state"):
            return str(content["state"])
    return " ".join(body.split())


def _after_comma(text: str) -> str:
    return f"; {text}" if text else ""
