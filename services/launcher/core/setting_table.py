"""`pdmesh settings`: what each service can be told, as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from common.runtime.setting_list import Setting

_REQUIRED = "(required)"
_EMPTY = "(empty)"


def render_settings(title: str, settings: Iterable[Setting]) -> str:
    """A block for one service: a line a setting, and below it what it means. No newline at the end."""
    rows = [(each.name, _default(each), each.kind, each.variable, each.text) for each in settings]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [title]
    for *cells, text in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines += [("  " + "  ".join(padded)).rstrip(), f"      {text}"]
    return "\n".join(lines)


def _default(setting: Setting) -> str:
    if setting.default is None:
        return _REQUIRED
    return setting.default or _EMPTY
