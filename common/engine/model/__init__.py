"""Qwen3.5 as one rank computes it: configuration, weights, layers, attention, the choice of tokens."""
