"""Mistakes with a name: each is planted into a copy of the project, and must be found by the tests that are there for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import engine_mutants, service_mutants
from tests.mutation.mutant import Mutant
from tests.mutation.planting import copy_project, is_found, run_tests

pytestmark = pytest.mark.long

MUTANTS = service_mutants.MUTANTS + engine_mutants.MUTANTS


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project."""
    folder = tmp_path_factory.mktemp("mutants")
    copy_project(folder)
    return folder


def test_the_sound_copy_passes(project: Path) -> None:
    """Without a mistake nothing fails: what the others see is the mistake."""
    status, output = run_tests(tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)), project)
    assert status == 0, output


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_found(mutant: Mutant, project: Path) -> None:
    """No mistake of the list gets past its tests."""
    assert is_found(mutant, project)
