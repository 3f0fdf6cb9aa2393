"""Mistakes with a name can be planted: what they change is there, once, and so are the tests that must find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import engine_mutants, service_mutants
from tests.mutation.mutant import Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", service_mutants.MUTANTS + engine_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant: Mutant) -> None:
    """A change of the code that leaves a mistake without its place is noticed here, and not a night later."""
    assert (ROOT / mutant.file).read_text().count(mutant.before) == 1
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists()
