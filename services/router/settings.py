"""What the router can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from common.runtime.settings import LogLevel, SettingsError, SettingsProblem
from contracts.errors import InvalidValueError
from contracts.ids import check_token

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router.

    `model` is the checkpoint's directory, of which the router reads tokenizer, chat template and configuration; its name
    is the model's unless `served_model_name` gives another, and workers must use the same. Port 0 takes a free one.
    `expected_workers` must all be there and linked before /ready says so; without any, one complete way is enough.

    A request without a length of its own gets `default_max_tokens`, or what fits if that is less. It ends within
    `request_timeout_s`, whatever happens. At most `max_concurrent_requests` are under way, counted by choices, and one
    HTTP request has at most `max_choices`. At most `max_connections` are open, and one on which no whole request head
    arrives for `idle_timeout_s` is closed. A body has `body_timeout_s` and `max_body_bytes`, all bodies that are being read
    together `max_bodies_bytes`. A stream whose client does not read is ended once `max_waiting_frames` of one choice wait
    for it, or once the buffers between have been full for `slow_reader_s`. A call to a worker or to the broker is
    repeated after `call_timeout_s`; a failed attempt is followed by others, `max_attempts` in all, after delays from
    `retry_delay_s` up to `max_retry_delay_s`.
    """

    model: Path
    served_model_name: str = ""
    router_id: str = "router-0"
    nats_url: str = "nats://127.0.0.1:4222"
    host: str = "127.0.0.1"
    port: Port = 8000
    expected_workers: tuple[str, ...] = ()
    default_max_tokens: Count = 256
    request_timeout_s: Seconds = 600.0
    body_timeout_s: Seconds = 60.0
    max_body_bytes: Count = 8 * 1024 * 1024
    max_bodies_bytes: Count = 128 * 1024 * 1024
    max_connections: Count = 2048
    idle_timeout_s: Seconds = 75.0
    max_concurrent_requests: Count = 512
    max_choices: Count = 128
    max_waiting_frames: Count = 1024
    slow_reader_s: Seconds = 30.0
    call_timeout_s: Seconds = 2.0
    cancel_timeout_s: Seconds = 5.0
    max_attempts: Count = 4
    retry_delay_s: Seconds = 0.05
    max_retry_delay_s: Seconds = 1.0
    retry_after_s: Count = 1
    tokenizer_threads: Count = 1
    inline_tokenizing_chars: Count = 4096
    drain_timeout_s: Seconds = 30.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        problems = []
        ids = [("router_id", self.router_id), *(("expected_workers", each) for each in self.expected_workers)]
        for key, value in ids:
            try:
                check_token(key, value)
            except InvalidValueError as error:
                problems.append(SettingsProblem(key=key, value=value, rule=error.rule_text))
        if self.max_choices > self.max_concurrent_requests:
            rule = f"at most max_concurrent_requests = {self.max_concurrent_requests}"
            problems.append(SettingsProblem(key="max_choices", value=str(self.max_choices), rule=rule))
        if self.max_body_bytes > self.max_bodies_bytes:
            rule = f"at most max_bodies_bytes = {self.max_bodies_bytes}"
            problems.append(SettingsProblem(key="max_body_bytes", value=str(self.max_body_bytes), rule=rule))
        if problems:
            raise SettingsError(problems)

    @property
    def model_name(self) -> str:
        """The name under which clients and workers know the model."""
        return self.served_model_name or self.model.resolve().name
