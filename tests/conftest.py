"""How `make test` spreads the tests over two processes: a mesh is started once, and what takes long begins first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED: Final = {
    "meshes": ("pair: Probe", "slow_pair: Probe"),
    "planted mesh": ("planted_shm: PlantedMesh",),
}
"""Meshes of a session, as tests ask for them: all files with one of a row are given to the same process."""
FIRST: Final = ("e2e", "integration", "property", "contract")
"""The folders with the longest tests, which must not begin when everything else is done."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Give whole files to processes, and the files of `SHARED` together, in the order of the collection."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    scopes: dict[str, str] = {}

    class ByFile(LoadScopeScheduling):  # type: ignore[misc] # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file not in scopes:
                scopes[file] = _scope(file, (config.rootpath / file).read_text(encoding="utf-8"))
            return scopes[file]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one process of several, begin with the folders that take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)  # stable: inside a folder the order stays


def _scope(file: str, source: str) -> str:
    """What the file is given out with."""
    for scope, parameters in SHARED.items():
        if re.search(rf"\b({'|'.join(parameters)})\b", source):
            return scope
    return file


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)
