"""What a prefill worker decides, as pure functions."""
