"""The cache broker: owns the handoff of a request from prefill to decode."""
