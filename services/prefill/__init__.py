"""The prefill worker: computes prompts and pushes their cache to decode workers."""
