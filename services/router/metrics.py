"""What the router counts."""

from typing import Final

from common.runtime.metrics import PHASE_BUCKETS, TOKEN_BUCKETS, Metrics

REPLAY_OUTCOMES: Final = ("news", "nothing_new", "unanswered", "lost")


class RouterMetrics:
    """The router's own metrics, in the registry of its process."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "router_requests_total",
            "HTTP requests by status; 499 means that the client left, another than 200 may stand inside a begun stream.",
            ("endpoint", "status"),
        )
        self.errors = metrics.counter(
            "router_errors_total", "HTTP requests that ended with an error, by its code.", ("endpoint", "code")
        )
        self.choices = metrics.counter(
            "router_choices_total",
            "Answers by how they ended: stop, length, error or cancelled.",
            ("endpoint", "finish_reason"),
        )
        self.running = metrics.gauge("router_running_requests", "Requests under way, counted by choices.")
        self.running_limit = metrics.gauge(
            "router_running_requests_limit", "Requests that may be under way; one more is refused with 429."
        )
        self.waiting_frames = metrics.gauge(
            "router_waiting_frames", "Pieces of answers that wait for their clients to read."
        )
        self.attempts = metrics.counter("router_attempts_total", "Attempts that were sent out.")
        self.retries = metrics.counter("router_retries_total", "Attempts that followed a failed one.", ("code",))
        self.redispatches = metrics.counter(
            "router_redispatches_total",
            "Attempts that went on behind tokens that had been delivered, by the error of the attempt before.",
            ("code",),
        )
        self.retries_refused = metrics.counter(
            "router_retries_refused_total", "Failed attempts that no other followed because no retry was left for them."
        )
        self.replays = metrics.counter(
            "router_replays_total",
            "Times that a worker was asked for tokens that did not come, by what came of it: news, nothing_new, unanswered or lost.",
            ("outcome",),
        )
        for outcome in REPLAY_OUTCOMES:  # shown as zero from the start, so that the first one is an increase
            self.replays.labels(outcome)
        self.cancels = metrics.counter("router_cancels_total", "Attempts that were taken back.")
        self.connections = metrics.gauge("router_connections", "Connections of clients that are open.")
        self.unsent_bytes = metrics.gauge(
            "router_unsent_bytes", "What was written to clients and waits in our buffers."
        )
        self.connections_refused = metrics.counter(
            "router_connections_refused_total", "Connections that were one too many."
        )
        self.malformed_requests = metrics.counter(
            "router_malformed_requests_total", "What clients sent that was no HTTP request."
        )
        self.slow_readers = metrics.counter(
            "router_slow_readers_total", "Answers that were broken off because the client did not read them."
        )
        self.prompt_tokens = metrics.counter("router_prompt_tokens_total", "Prompt tokens of accepted requests.")
        self.tokens = metrics.counter("router_generated_tokens_total", "Tokens that were delivered to clients.")
        self.prepare = metrics.histogram(
            "router_prepare_seconds",
            "From a request's body to its first message on the bus: the router's own part.",
            buckets=PHASE_BUCKETS,
        )
        self.submit = metrics.histogram(
            "router_submit_seconds", "Sending an attempt's prompt and having it accepted.", buckets=PHASE_BUCKETS
        )
        self.first_token = metrics.histogram(
            "router_time_to_first_token_seconds",
            "From a request's body to the first token of a choice.",
            ("endpoint",),
            buckets=PHASE_BUCKETS,
        )
        self.between_tokens = metrics.histogram(
            "router_inter_token_seconds",
            "Between a token and the next one of its choice; tokens that came in one frame share the time since the last frame.",
            ("endpoint",),
            buckets=PHASE_BUCKETS,
        )
        self.per_token = metrics.histogram(
            "router_time_per_output_token_seconds",
            "From the first to the last token of a choice, divided by the tokens after the first.",
            ("endpoint",),
            buckets=PHASE_BUCKETS,
        )
        self.total = metrics.histogram(
            "router_request_seconds",
            "From a request's body to the end of its answer, of requests that ended with status 200.",
            ("endpoint",),
            buckets=PHASE_BUCKETS,
        )
        self.request_prompt_tokens = metrics.histogram(
            "router_request_prompt_tokens",
            "Prompt tokens of an accepted request.",
            ("endpoint",),
            buckets=TOKEN_BUCKETS,
        )
        self.output_tokens = metrics.histogram(
            "router_choice_output_tokens", "Tokens of a choice that had any.", ("endpoint",), buckets=TOKEN_BUCKETS
        )
