"""Caches on their way between ranks of two workers: who is linked, what is pushed, what is pulled."""
