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
