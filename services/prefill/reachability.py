"""Whether a decode worker's memory can be reached over the network at all, found out before the engine connects to it.

An engine makes few links at a time, and waits long for each. So the worker knocks first: a peer whose host swallows packets is
found out sooner, and holds up no other peer's link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, PdmeshError

KNOCK_S: Final = 3.0
_BY_NETWORK: Final = "tcp"


async def knock(regions: Iterable[RegionDescriptor | None]) -> None:
    """Return once every region that listens on a network address takes a connection; others are not looked at.

    Raises TRANSFER_FAILED that names the address which did not within `KNOCK_S`.
    """
    addresses = {region.opaque for region in regions if region is not None and region.transport == _BY_NETWORK}
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, ValueError, OverflowError) as error:  # TimeoutError is an OSError
            text = f"no connection to {address} within {KNOCK_S:g} s: {str(error) or type(error).__name__}"
            raise PdmeshError(text, code=ErrorCode.TRANSFER_FAILED) from error
        writer.transport.abort()
