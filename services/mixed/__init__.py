"""The mixed worker: prefill and decode in one engine."""
