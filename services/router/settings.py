"""What the router can be told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.runtime.setting_types import Count, LogLevel, NatsReplicas, Port, Seconds, Share
from common.runtime.settings import SettingsError, SettingsProblem
from contracts.errors import InvalidValueError
from contracts.ids import check_token


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router."""

    model: Path
    """Folder of the checkpoint: tokenizer, chat template and configuration are read."""
    served_model_name: str = ""
    """Name under which clients and workers know the model; empty: the folder's."""
    router_id: str = "router-0"
    """Its name in subjects, events and logs."""
    nats_url: str = "nats://127.0.0.1:4222"
    """Where NATS is."""
    nats_replicas: NatsReplicas = 1
    """Servers of a NATS cluster that keep each bucket and stream, alike for all services; with several, leases last half as long again."""
    host: str = "127.0.0.1"
    """Address at which it serves HTTP."""
    port: Port = 8000
    """Port at which it serves HTTP; 0: a free one, named in the log."""
    expected_workers: tuple[str, ...] = ()
    """Workers that must be there and linked before /ready says so; none: one complete way is enough."""
    default_max_tokens: Count = 256
    """What a request without a length of its own gets, or what fits if that is less."""
    request_timeout_s: Seconds = 600.0
    """When a request ends, whatever happens."""
    body_timeout_s: Seconds = 60.0
    """How long a body may take to arrive."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """Bytes of one body."""
    max_bodies_bytes: Count = 128 * 1024 * 1024
    """Bytes of all bodies that are being read together."""
    max_connections: Count = 2048
    """Connections that may be open; one more is refused."""
    idle_timeout_s: Seconds = 75.0
    """A connection on which no whole request head arrives for this long is closed."""
    max_concurrent_requests: Count = 512
    """Choices that may be under way, of all requests together; more are refused."""
    max_choices: Count = 128
    """Choices of one HTTP request: its prompts times n."""
    max_waiting_frames: Count = 1024
    """Frames of one choice that may wait for its client before the stream is ended."""
    slow_reader_s: Seconds = 30.0
    """How long a client may leave its buffers full before the stream is ended."""
    call_timeout_s: Seconds = 2.0
    """A call to a worker or to the broker is repeated after this long without an answer."""
    cancel_timeout_s: Seconds = 30.0
    """How long a cancel is repeated at least until the broker has heard of it, also behind the request's deadline."""
    outage_patience_s: Seconds = 12.0
    """How long a request waits for NATS, or for a broker that takes over (up to 11 s, on a NATS cluster 16.5 s), before its attempt has failed; the next one waits anew."""
    max_attempts: Count = 4
    """Attempts at one request that may fail without a token between them."""
    max_failures: Count = 8
    """Attempts at one request that may fail, whatever they delivered."""
    max_preemptions: Count = 64
    """Times that one request may be preempted on a decode worker; these are no failures."""
    retry_delay_s: Seconds = 0.05
    """Pause before the second attempt; later ones double."""
    max_retry_delay_s: Seconds = 1.0
    """The longest pause between attempts."""
    reroute_wait_s: Seconds = 30.0
    """How long a request that has lost its workers waits for others to take it."""
    retry_budget: Count = 512
    """Retries of all requests together that may be saved up; half of them are kept for begun answers and lost workers."""
    retry_share: Share = 0.1
    """Retries that each request adds to the budget."""
    retry_floor_per_s: Seconds = 2.0
    """Retries that each second adds to the budget."""
    retry_after_s: Count = 1
    """The least that Retry-After names when a request is refused for lack of room."""
    retry_after_restart_s: Count = 10
    """What Retry-After names while no worker of a role is ready: about as long as one takes to start again."""
    max_retry_after_s: Count = 60
    """The most that Retry-After names."""
    tokenizer_threads: Count = 1
    """Threads that tokenize long texts."""
    inline_tokenizing_chars: Count = 4096
    """Requests whose text is up to this long in all are tokenized at once, without a thread."""
    drain_timeout_s: Seconds = 30.0
    """How long a drain waits for requests before it is cut short."""
    log_level: LogLevel = "info"
    """Lines below it are left out of the log."""

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
        if self.retry_after_s > self.max_retry_after_s:
            rule = f"at most max_retry_after_s = {self.max_retry_after_s}"
            problems.append(SettingsProblem(key="retry_after_s", value=str(self.retry_after_s), rule=rule))
        if problems:
            raise SettingsError(problems)

    @property
    def model_name(self) -> str:
        """The name under which clients and workers know the model."""
        return self.served_model_name or self.model.resolve().name
