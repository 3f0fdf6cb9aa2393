"""Ports of this machine, and what a client here calls a server that listens on one."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Final

_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens on every address is reached from here. On `::` it takes no IPv4."""


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def url_of(host: str, port: int) -> str:
    """The URL at which a client on this machine reaches an HTTP server that listens on `host`, a name or an address."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:  # as asyncio's servers do, beside which IPv4 may have the same port
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
