"""What a load test says at its end: tables for people, the same figures by name as JSON, and what went wrong."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.statistics import Spread

EXIT_GOOD: Final = 0
EXIT_FAILED: Final = 1
_FORMAT_VERSION: Final = 1
_NONE: Final = "-"
_JUDGED: Final = {True: "met", False: "missed", None: "not comparable"}


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of texts. The first `num_names` columns are names, the others numbers. `legend` says of each column what it is, or is empty."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 1
    legend: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a legend of other columns."""
        if self.legend and len(self.legend) != len(self.header):
            raise ValueError(f"legend: {self.legend!r} is not allowed; the rule is: one text for each of {self.header}")

    def render(self) -> str:
        """The table as lines of equal columns, and its legend; no newline at the end."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [self.title]
        for line in lines:
            cells = [
                cell.ljust(width) if column < self.num_names else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            shown.append(("  " + "  ".join(cells)).rstrip())
        if self.legend:
            width = max(map(len, self.header))
            shown.append("  where")
            shown += [f"    {name.ljust(width)}  {text}" for name, text in zip(self.header, self.legend, strict=True)]
        return "\n".join(shown)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures come from. A load average near the number of cores before the start means that others were at work."""

    num_cores: int
    load_average: float
    processor: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            num_cores=os.cpu_count() or 1,
            load_average=round(os.getloadavg()[0], 2),
            processor=platform.machine(),
            python=platform.python_version(),
        )

    @property
    def line(self) -> str:
        """One line for people."""
        return (
            f"machine: {self.num_cores} cores ({self.processor}), Python {self.python}, load average "
            f"{self.load_average:.2f} before the start"
        )


class Report:
    """Collects as the test goes. What `fail` is told of makes the command fail; an aim that was missed is said, and does not."""

    def __init__(self, command: str, settings: dict[str, Any], machine: Machine) -> None:
        self._command = command
        self._settings = settings
        self._machine = machine
        self._tables: list[Table] = []
        self._figures: dict[str, Any] = {}
        self._aims: list[tuple[str, str, bool | None]] = []
        self._failures: list[str] = []

    def add(self, table: Table) -> None:
        """Show a table."""
        self._tables.append(table)

    def put(self, name: str, value: Any) -> None:
        """Keep figures under a name that no other figures have."""
        if name in self._figures:
            raise ValueError(f"name: {name!r} is not allowed; the rule is: a name that was not used yet")
        self._figures[name] = value

    def aim(self, what: str, shown: str, *, met: bool | None) -> None:
        """Say whether an aim was met; `shown` is what was measured beside what was wanted.

        None: the conditions that the aim is made for did not come about, so that it cannot be judged.
        """
        self._aims.append((what, shown, met))

    def fail(self, what: str) -> None:
        """Say what must not be: the command ends with status 1."""
        self._failures.append(what)

    @property
    def status(self) -> int:
        """The exit status that follows."""
        return EXIT_FAILED if self._failures else EXIT_GOOD

    def text(self) -> str:
        """Everything for people."""
        parts = [self._machine.line, *(table.render() for table in self._tables)]
        if self._aims:
            rows = tuple((what, shown, _JUDGED[met]) for what, shown, met in self._aims)
            parts.append(Table(title="aims", header=("aim", "measured", ""), rows=rows, num_names=3).render())
        parts += [*(f"FAILED: {failure}" for failure in self._failures), self.verdict]
        return "\n\n".join(parts)

    @property
    def verdict(self) -> str:
        """The last line: whether all that came out was right, and, apart from that, how many aims were met; which, tells their table."""
        count = len(self._failures)
        right = f"{count} failure{'s' * (count > 1)}" if count else "passed"
        if not self._aims:
            return right
        judged = [met for _, _, met in self._aims]
        others = f", {judged.count(None)} {_JUDGED[None]}" if None in judged else ""
        return f"{right}; aims: {judged.count(True)} met, {judged.count(False)} missed{others}"

    def json(self) -> bytes:
        """The same for programs: one object."""
        content = {
            "format_version": _FORMAT_VERSION,
            "command": self._command,
            "settings": self._settings,
            "machine": self._machine,
            "figures": self._figures,
            "aims": [{"aim": what, "measured": shown, "met": met} for what, shown, met in self._aims],
            "failures": self._failures,
        }
        return msgspec.json.format(msgspec.json.encode(content, enc_hook=_plain), indent=2) + b"\n"


def number(value: float | None, places: int = 2) -> str:
    """A number with so many places, or a dash for none."""
    return _NONE if value is None else f"{value:,.{places}f}"


def percent(value: float | None, places: int = 2) -> str:
    """A share as per cent, or a dash for none."""
    return _NONE if value is None else f"{value:.{places}%}"


def times(values: Sequence[float | None]) -> str:
    """A ratio, with the lowest and the highest of the rounds behind it."""
    first, *others = values
    known = [value for value in others if value is not None]
    shown = "" if not known else f" [{min(known):.2f}, {max(known):.2f}]"
    return _NONE if first is None else f"{first:.2f}{shown}"


def p50_p99(values: Spread | None, places: int = 2) -> tuple[str, str]:
    """Two cells: median and 99th percentile."""
    return (_NONE, _NONE) if values is None else (number(values.p50, places), number(values.p99, places))


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a figure")
