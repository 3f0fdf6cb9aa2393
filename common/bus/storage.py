"""What the mesh keeps on the bus: the one place that says how each bucket and stream is made."""

from __future__ import annotations

from typing import Final

from common.bus.port import BucketConfig, Bus, StreamConfig, bucket_ttl_s
from contracts.subjects import (
    EVENTS_FILTER,
    EVENTS_STREAM,
    HANDOFFS_BUCKET,
    LEASES_BUCKET,
    LINKS_BUCKET,
    ROUTERS_BUCKET,
    WORKERS_BUCKET,
)

WORKER_TTL_S: Final = 6.0
"""Seconds after its last record that a worker counts as gone."""

ROUTER_TTL_S: Final = 6.0
"""Seconds after its last record that a router counts as gone."""

LINK_TTL_S: Final = 15.0
"""Seconds after its last writing that a link's record disappears: its prefill worker is gone."""

LEASE_TTL_S: Final = 10.0
"""Seconds after its last renewal that a lease is free. The election of a new leader among NATS servers takes up to seven."""

WORKERS_CONFIG: Final = BucketConfig(name=WORKERS_BUCKET, ttl_s=WORKER_TTL_S, is_lease=True)
ROUTERS_CONFIG: Final = BucketConfig(name=ROUTERS_BUCKET, ttl_s=ROUTER_TTL_S, is_lease=True)
LINKS_CONFIG: Final = BucketConfig(name=LINKS_BUCKET, ttl_s=LINK_TTL_S, is_lease=True)
LEASES_CONFIG: Final = BucketConfig(name=LEASES_BUCKET, ttl_s=LEASE_TTL_S, is_lease=True)
EVENTS_CONFIG: Final = StreamConfig(name=EVENTS_STREAM, subjects=(EVENTS_FILTER,))


def ttl_on(bus: Bus, ttl_s: float) -> float:
    """How long a sign of life counts on a bus: `ttl_s` with one server, longer with several."""
    return bucket_ttl_s(ttl_s, bus.replicas)


def handoffs_config(keep_s: float) -> BucketConfig:
    """The bucket of handoff records, each kept `keep_s` seconds after its last change."""
    return BucketConfig(name=HANDOFFS_BUCKET, ttl_s=keep_s)
