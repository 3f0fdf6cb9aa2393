"""What a broker can be told."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.runtime.setting_types import Count, LogLevel, NatsReplicas, Port, Seconds
from common.runtime.settings import SettingsError, SettingsProblem
from contracts.errors import InvalidValueError
from contracts.ids import check_token


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a broker."""

    broker_id: str = "broker-0"
    """Its name in leases, events and logs."""
    nats_url: str = "nats://127.0.0.1:4222"
    """Where NATS is."""
    nats_replicas: NatsReplicas = 1
    """Servers of a NATS cluster that keep each bucket and stream, alike for all services; with several, leases last half as long again."""
    partition: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Which share of the handoffs it owns; brokers of one partition stand by for each other."""
    max_in_flight: Count = 4096
    """Handoffs that may be under way; one more is refused."""
    max_ended: Count = 16384
    """Ended handoffs that stay in memory at most."""
    call_timeout_s: Seconds = 2.0
    """A message to a worker is repeated after this long without an answer."""
    lost_after_s: Seconds = 1.0
    """A worker that nobody answers for counts as lost after this long."""
    describe_timeout_s: Seconds = 10.0
    """How long the description of a pair may take that is met for the first time."""
    store_timeout_s: Seconds = 5.0
    """A record that cannot be written in this time fails its handoff."""
    release_timeout_s: Seconds = 30.0
    """How long a release is repeated, unless the worker's lease ends before."""
    tombstone_margin_ms: Count = 5_000
    """How long past the deadline a worker turns away what was released."""
    parts_query_ms: Count = 50
    """How long after the end of a prefill missing parts are asked for."""
    deadline_grace_ms: Count = 250
    """How long after its deadline the broker ends a handoff: the workers come first."""
    keep_ended_s: Seconds = 60.0
    """How long an ended handoff stays in memory, for those who ask again."""
    record_ttl_s: Seconds = 3600.0
    """How long a record stays in the bucket after its last change."""
    drain_timeout_s: Seconds = 30.0
    """How long a drain waits for handoffs before it is cut short."""
    log_level: LogLevel = "info"
    """Lines below it are left out of the log."""
    admin_host: str = "127.0.0.1"
    """Address on which /health, /ready and /metrics are served, to whoever reaches it."""
    admin_port: Port = 0
    """Their port; 0: a free one, named in the log."""

    def __post_init__(self) -> None:
        try:
            check_token("broker_id", self.broker_id)
        except InvalidValueError as error:
            problem = SettingsProblem(key="broker_id", value=self.broker_id, rule=error.rule_text)
            raise SettingsError([problem]) from error
