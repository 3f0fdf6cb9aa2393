"""Two routers of one id would cancel each other's requests: the one that comes second finds the first, and does not begin."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from common.bus.errors import BusError
from common.bus.kept_record import PUT_EVERY_S
from common.bus.port import Bus
from common.bus.storage import ROUTERS_CONFIG
from common.runtime.lifecycle import Log
from contracts import ids, subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, PdmeshError
from contracts.requests import TokenFrame
from contracts.routers import RouterRecord

_ONE_PUT_S: Final = 1.5 * PUT_EVERY_S
"""Whoever is alive has put its record in the meantime."""
_NOBODY: Final = "nobody"
"""A request that no router has: it throws away what is said about it."""


class RouterIdTakenError(PdmeshError):
    """Another router of this id serves already."""

    code = ErrorCode.DUPLICATE


async def check_unique(router_id: str, bus: Bus, log: Log) -> None:
    """Raise `RouterIdTakenError` when a router of this id is at work; to be called before this one listens for tokens.

    One that signed off has left no record. One that was killed left its own, but listens no more: its restart goes on at once. One
    that listens is at work if it puts its record once more; if it stands still or is cut off it is replaced, and ends when it comes
    back. Raises `BusError` when the bucket cannot be read.
    """
    bucket = await bus.ensure_bucket(ROUTERS_CONFIG)
    before = await bucket.get(router_id)
    if before is None:
        return
    await _wait_for_a_put(router_id, bus)
    after = await bucket.get(router_id)
    if after is None or after.revision == before.revision:
        return
    try:
        other = decode(after.value, RouterRecord).incarnation
    except CodecError:
        other = "of a record that cannot be read"
    log.error("router_id_taken", router_id=router_id, other_incarnation=other)
    rule = f"no two routers of a mesh have the same, and the start {other} is at work"
    remedy = "give each router an id of its own (router_id=..., or PD_ROUTER_ID)"
    raise RouterIdTakenError(f"router_id: {router_id!r} is not allowed; the rule is: {rule}; {remedy}")


async def _wait_for_a_put(router_id: str, bus: Bus) -> None:
    """Wait for as long as a router takes to put its record once more; not at all when nobody listens for its tokens."""
    frame = TokenFrame(handoff_id=ids.handoff_id(_NOBODY, 0), request_id=_NOBODY, attempt=0, index=0)
    with suppress(BusError):  # who listens says nothing to that, and nobody is told of at once
        await bus.request(subjects.tokens(router_id, _NOBODY), encode(frame), timeout=_ONE_PUT_S)
