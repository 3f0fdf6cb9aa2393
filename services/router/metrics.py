"""What the router counts."""

from common.runtime.metrics import Metrics


class RouterMetrics:
    """The router's own metrics, in the registry of its process."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "router_requests_total", "HTTP requests to generate, by what became of them.", ("endpoint", "status")
        )
        self.running = metrics.gauge("router_running_requests", "Requests under way, counted by choices.")
        self.attempts = metrics.counter("router_attempts_total", "Attempts that were sent out.")
        self.retries = metrics.counter("router_retries_total", "Attempts that followed a failed one.", ("code",))
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
            "router_prepare_seconds", "From a request's body to its first message on the bus: the router's own part."
        )
        self.first_token = metrics.histogram(
            "router_first_token_seconds", "From the first message on the bus to the first token."
        )
        self.total = metrics.histogram(
            "router_request_seconds", "From a request's body to the end of its answer.", ("endpoint",)
        )
