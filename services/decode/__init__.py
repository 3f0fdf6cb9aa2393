"""The decode worker: takes requests over after prefill and generates their tokens."""
