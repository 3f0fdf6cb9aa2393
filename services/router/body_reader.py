"""Request bodies on their way in: whole, in time, and bounded, each and all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from contracts.errors import ErrorCode, PdmeshError
from services.router.settings import RouterSettings


class BodyReader:
    """Reads bodies of at most `max_body_bytes`, decompressed, within `body_timeout_s`.

    Together they are at most `max_bodies_bytes` large while they are read and decoded.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies that are being read or decoded."""
        return self._held_bytes

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytearray]:
        """Give the whole body, which counts as held while the context lasts.

        Raises `PdmeshError`: `deadline_exceeded`, `body_too_large`, `overloaded`, or `invalid_request` for a body that is
        not what its headers say.
        """
        body = bytearray()
        try:
            await self._fill(body, request)
            yield body
        finally:
            self._held_bytes -= len(body)

    async def _fill(self, body: bytearray, request: web.Request) -> None:
        self._check_size(request.content_length or 0)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for part in request.content.iter_any():
                    body += part
                    self._held_bytes += len(part)
                    self._check_size(len(body))
                    self._check_room()
        except TimeoutError:
            message = f"body: it did not come within {self._settings.body_timeout_s:g} s"
            raise PdmeshError(message, code=ErrorCode.DEADLINE_EXCEEDED) from None
        except web.RequestPayloadError as error:
            coding = request.headers.get("Content-Encoding", "identity")[:40]
            rule = f"whole, and in the Content-Encoding {coding!r}"
            message = f"body: it is not what its headers say; the rule is: {rule}"
            raise PdmeshError(message, code=ErrorCode.INVALID_REQUEST) from error

    def _check_size(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            message = f"body: {size} bytes or more; the rule is: at most {self._settings.max_body_bytes}"
            raise PdmeshError(message, code=ErrorCode.BODY_TOO_LARGE)

    def _check_room(self) -> None:
        if self._held_bytes > self._settings.max_bodies_bytes:
            message = (
                f"bodies of {self._held_bytes} bytes are being read; at most {self._settings.max_bodies_bytes} fit"
            )
            raise PdmeshError(message, code=ErrorCode.OVERLOADED)
