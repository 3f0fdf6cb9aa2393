"""The one error of the smoke test."""

from __future__ import annotations


class ComposeError(Exception):
    """Something that the smoke test needs is not there, or something that it checked does not hold; the text says which."""
