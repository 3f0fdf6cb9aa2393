"""The Qwen3.5 engine: ranks, caches, attention, sampling."""
