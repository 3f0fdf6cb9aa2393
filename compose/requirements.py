"""Print what `pyproject.toml` beside this file, or in the folder above, requires of a worker: one requirement a line.

The image installs these before the project itself, so that a change of code leaves the layer with torch alone.
"""

import argparse
import tomllib
from pathlib import Path


def requirements(project: Path, *, only: str = "", build: bool = False) -> list[str]:
    """What services and workers need to run; `build` adds what building the package needs, `only` names one package."""
    content = tomllib.loads(project.read_text(encoding="utf-8"))
    found = [*content["project"]["dependencies"], *content["project"]["optional-dependencies"]["worker"]]
    if build:
        found += content["build-system"]["requires"]
    return [each for each in found if each.startswith(only)]


def main() -> None:
    """Answer the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--build", action="store_true")
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parent
    project = next(each for each in (here / "pyproject.toml", here.parent / "pyproject.toml") if each.is_file())
    print(*requirements(project, only=arguments.only, build=arguments.build), sep="\n")


if __name__ == "__main__":
    main()
