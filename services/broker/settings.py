"""What a broker can be told."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.runtime.settings import LogLevel, SettingsError, SettingsProblem
from contracts.errors import InvalidValueError
from contracts.ids import check_token

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a broker.

    At most `max_in_flight` handoffs are under way; one more is refused. A message to a worker is repeated after
    `call_timeout_s` without an answer; a worker that nobody answers for counts as lost after `lost_after_s`. A record that
    cannot be written within `store_timeout_s` fails its handoff. A release is repeated for `release_timeout_s`, unless the
    worker's lease ends before, and then stands at the worker until the deadline and `tombstone_margin_ms`. Parts that are
    missing `parts_query_ms` after the end of a prefill are asked for.

    The broker ends a handoff `deadline_grace_ms` after its deadline: the workers, which have the same one, come first.
    Ended handoffs stay in memory for `keep_ended_s`, at most `max_ended` of them, and in the bucket for `record_ttl_s`.
    """

    broker_id: str = "broker-0"
    nats_url: str = "nats://127.0.0.1:4222"
    partition: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_in_flight: Count = 4096
    max_ended: Count = 16384
    call_timeout_s: Seconds = 2.0
    lost_after_s: Seconds = 1.0
    describe_timeout_s: Seconds = 10.0
    store_timeout_s: Seconds = 5.0
    release_timeout_s: Seconds = 30.0
    tombstone_margin_ms: Count = 5_000
    parts_query_ms: Count = 50
    deadline_grace_ms: Count = 250
    keep_ended_s: Seconds = 60.0
    record_ttl_s: Seconds = 3600.0
    drain_timeout_s: Seconds = 30.0
    log_level: LogLevel = "info"
    admin_port: Port = 0

    def __post_init__(self) -> None:
        try:
            check_token("broker_id", self.broker_id)
        except InvalidValueError as error:
            problem = SettingsProblem(key="broker_id", value=self.broker_id, rule=error.rule_text)
            raise SettingsError([problem]) from error
