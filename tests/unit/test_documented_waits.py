"""What the README says of waits, on one NATS server and on a cluster, is what they are."""

import re
from pathlib import Path
from unittest.mock import Mock

from common.bus.lease import Lease
from common.bus.memory import MemoryServer
from common.bus.port import BucketConfig, bucket_ttl_s
from common.bus.storage import LEASE_TTL_S, LINK_TTL_S, ROUTER_TTL_S, WORKER_TTL_S
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.leases import LeaseValue
from services.router.settings import RouterSettings

README = " ".join((Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8").split())
CLUSTER = 3
EARLY_S = 0.01
NUM_PLACES = 20


def _worst_takeover_s(replicas: int) -> float:
    """From the last sign of life of the one that led to the next term, of whichever candidate begins to look at the worst moment."""
    ttl_s = bucket_ttl_s(LEASE_TTL_S, replicas)

    async def main(clock: VirtualClock) -> float:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(BucketConfig(name="LEASES", ttl_s=ttl_s))

        def candidate(name: str) -> Lease:
            value = LeaseValue(holder=name, start=name)
            return Lease(bucket, clock, Mock(), key="broker.0", value=value, ttl_s=ttl_s)

        began = clock.monotonic()
        assert await candidate("first").try_acquire() is not None
        await clock.sleep(begins_at)
        await candidate("second").acquire()
        return clock.monotonic() - began

    worst_s = 0.0
    for place in range(1, NUM_PLACES + 1):
        begins_at = ttl_s * place / NUM_PLACES - EARLY_S
        worst_s = max(worst_s, run_virtual(main))
    return worst_s + EARLY_S


def test_silence_counts_after_what_the_readme_says() -> None:
    """Workers, routers, and the records of links."""
    assert WORKER_TTL_S == ROUTER_TTL_S
    worker, link = ((bucket_ttl_s(ttl_s, CLUSTER), ttl_s) for ttl_s in (WORKER_TTL_S, LINK_TTL_S))
    assert "a worker or a router counts as gone after {:g} s instead of {:g} s".format(*worker) in README
    assert "a link's record after {:g} s instead of {:g} s".format(*link) in README
    alone, among_several = ROUTER_TTL_S, bucket_ttl_s(ROUTER_TTL_S, CLUSTER)
    assert f"ended {alone:g} s after its last sign of life ({among_several:g} s [on a cluster]" in README


def test_another_broker_leads_after_what_the_readme_says() -> None:
    """At the worst: a candidate that finds the lease held a moment before it runs out looks again a tenth of its time later."""
    alone, among_several = (_worst_takeover_s(replicas) for replicas in (1, CLUSTER))
    assert f"another broker leads after {among_several:g} s at most instead of {alone:g} s" in README
    assert f"after {alone:g} s at most ({among_several:g} s on a cluster)" in README


def test_a_router_is_as_patient_as_the_readme_says() -> None:
    """By default it sits out a takeover on one server but not one on a cluster; as the README tells to set it, that one, too."""
    patience_s = RouterSettings(model=Path("model")).outage_patience_s
    assert f"A router waits {patience_s:g} s for a broker" in README
    told = re.search(r"--set router.outage_patience_s=(\d+)` sits out a takeover on a cluster", README)
    assert told is not None
    alone, among_several = (_worst_takeover_s(replicas) for replicas in (1, CLUSTER))
    assert alone < patience_s < among_several < float(told[1])
