"""What a router says of itself in `PD_ROUTERS`: that it is there."""

from __future__ import annotations

from contracts.codec import Versioned
from contracts.ids import Token


class RouterRecord(Versioned, frozen=True, kw_only=True, tag="router_record"):
    """A router's key in `PD_ROUTERS`, put every 2 s; the bucket's time to live removes a dead router's.

    With it goes every request of that start: nobody waits for their tokens.
    """

    router_id: Token
    incarnation: Token
