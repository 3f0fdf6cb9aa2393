"""The names of the tests of this project, for tables that cite them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARK_OR_DEFINITION = re.compile(r"^(?:(@pytest\.mark\.long)$|(?:async )?def (\w+)|class )", re.MULTILINE)
_LONG_MODULE = re.compile(r"^pytestmark = .*\bpytest\.mark\.long\b", re.MULTILINE)


def found_in(module: str) -> Iterator[tuple[str, bool]]:
    """Names of the tests in a module, and whether they run with `make test`: neither they nor their module is marked as long."""
    module_runs, runs = _LONG_MODULE.search(module) is None, True
    for match in _MARK_OR_DEFINITION.finditer(module):
        mark, name = match.groups()
        if name is not None and name.startswith("test_"):
            yield name, module_runs and runs
        runs = mark is None


@lru_cache(maxsize=1)
def known_tests() -> dict[str, bool]:
    """Whether each test runs with `make test`; of several with one name, whether any of them does."""
    found: dict[str, bool] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name, runs in found_in(file.read_text()):
            found[name] = runs or found.get(name, False)
    return found
