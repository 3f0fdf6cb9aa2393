"""`python -m tests.mutation.report`: what the last `mutmut run` found, core by core. Ends with 1 when tests miss too much.

mutmut leaves a file of verdicts beside each module that it changed: by mutant, how the tests ended that saw it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

FOLDER: Final = Path("mutants")
LEAST_SHARE: Final = 0.9
"""Of the mutants of a core that have been tried, so many at least are to be found by a test."""


class Verdict(Enum):
    """What became of one mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    NO_TEST = "no test"
    UNTRIED = "untried"


VERDICTS: Final[Mapping[int | None, Verdict]] = {
    0: Verdict.SURVIVED,
    5: Verdict.NO_TEST,
    33: Verdict.NO_TEST,
    34: Verdict.UNTRIED,
    2: Verdict.UNTRIED,
    None: Verdict.UNTRIED,
}
"""By exit status of the tests. Any other is a failure of theirs, a time-out or a crash: the mutant was noticed."""


def read_verdicts(folder: Path = FOLDER) -> dict[str, Counter[Verdict]]:
    """The verdicts of each core, by its path. Raises `FileNotFoundError` when there are none at all."""
    cores: dict[str, Counter[Verdict]] = {}
    for path in sorted(folder.glob("**/core/*.py.meta")):
        exits = json.loads(path.read_bytes())["exit_code_by_key"].values()
        core = cores.setdefault(str(path.parent.relative_to(folder)), Counter())
        core.update(VERDICTS.get(status, Verdict.KILLED) for status in exits)
    cores = {core: counts for core, counts in cores.items() if counts.total()}
    if not cores:
        raise FileNotFoundError(f"{folder}: no mutants; run mutmut first")
    return cores


def share(counts: Counter[Verdict]) -> float:
    """The part that was killed of those that were tried; what no test reaches counts as missed. 0 when none was tried."""
    num_tried = counts.total() - counts[Verdict.UNTRIED]
    return counts[Verdict.KILLED] / num_tried if num_tried else 0.0


def lines(cores: Mapping[str, Counter[Verdict]]) -> Iterable[str]:
    """The table, for people."""
    yield f"{'core':<26}{'mutants':>9}" + "".join(f"{verdict.value:>10}" for verdict in Verdict) + f"{'share':>9}"
    for core, counts in cores.items():
        figures = "".join(f"{counts[verdict]:>10}" for verdict in Verdict)
        yield f"{core:<26}{counts.total():>9}{figures}{share(counts):>9.1%}"


def is_good(cores: Mapping[str, Counter[Verdict]]) -> bool:
    """Whether every core's tests find enough of its mutants, and all of them have been tried."""
    return all(not counts[Verdict.UNTRIED] and share(counts) >= LEAST_SHARE for counts in cores.values())


def main() -> int:
    """Print the table; 0 when it is good."""
    cores = read_verdicts()
    print("\n".join(lines(cores)))
    if is_good(cores):
        return 0
    print(f"each core is to have {LEAST_SHARE:.0%} of its mutants killed, and none untried", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
