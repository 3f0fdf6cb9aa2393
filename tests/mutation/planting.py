"""A copy of the project with one mistake in it, and its tests run there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from common.runtime.settings import environment
from tests.mutation.mutant import Mutant

ROOT: Final = Path(__file__).resolve().parents[2]
_COPIED: Final = ("common", "contracts", "services", "loadtest", "tests", "compose")
_LINKED: Final = ("pyproject.toml", "models", "docs", "README.md")
_TIMEOUT_S: Final = 300.0
_TESTS_FAILED: Final = 1


def copy_project(folder: Path) -> None:
    """Everything that tests need, without what others have built there."""
    ignore = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)


def is_found(mutant: Mutant, folder: Path) -> bool:
    """Plant the mistake into a copy, run its tests until the first that fails, and take it out again.

    Raises AssertionError when the text that it changes is not there once, or when the tests cannot be run at all.
    """
    file = folder / mutant.file
    sound = file.read_text(encoding="utf-8")
    if sound.count(mutant.before) != 1:
        raise AssertionError(
            f"{mutant.name}: {mutant.before!r} stands in {mutant.file} {sound.count(mutant.before)} times"
        )
    file.write_text(sound.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        status, output = run_tests(mutant.tests, folder)
    finally:
        file.write_text(sound, encoding="utf-8")
    if status not in {0, _TESTS_FAILED}:
        raise AssertionError(f"{mutant.name}: the tests could not be run:\n{output}")
    return status == _TESTS_FAILED


def run_tests(tests: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Exit status of pytest, and the end of what it said."""
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *tests),
        cwd=folder,
        env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
