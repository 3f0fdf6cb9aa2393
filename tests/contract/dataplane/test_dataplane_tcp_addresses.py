"""Where a TCP data plane listens, and what it tells its peers of that."""

from __future__ import annotations

import pytest

from common.dataplane.port import DataPlaneError
from common.dataplane.tcp import TcpDataPlane
from tests.contract.dataplane.bench import NOW, soon


def test_an_address_that_cannot_be_used_is_refused_by_name() -> None:
    """The error names the setting."""
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(DataPlaneError, match="transport_host"):
            TcpDataPlane(host, peer_id="p", incarnation="i", now=NOW)


def test_peers_are_told_the_address_to_come_to() -> None:
    """A plane that listens everywhere advertises one name; an IPv6 address is put into brackets."""
    plane = TcpDataPlane("0.0.0.0", peer_id="p", incarnation="i", now=NOW, advertise_host="localhost")
    region = plane.allocate(4096, 1)
    assert region.descriptor.opaque == f"localhost:{plane.server.port}"
    plane.connect(region.descriptor, soon()).close()
    plane.close()
    six = TcpDataPlane("127.0.0.1", peer_id="p", incarnation="i", now=NOW, advertise_host="fe80::1")
    assert six.allocate(1, 1).descriptor.opaque == f"[fe80::1]:{six.server.port}"
    six.close()
