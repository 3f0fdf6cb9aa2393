"""A mistake that the tests must never let pass, with the tests that are to find it."""

from __future__ import annotations

import msgspec


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """`before`, which stands in `file` once, becomes `after`; then one of `tests` must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
