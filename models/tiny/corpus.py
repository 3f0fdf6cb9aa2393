"""The text to learn from: the King James Bible and six novels by Jane Austen, all in the public domain.

Both are read from Debian packages: `bible-kjv-text` through its `bible` command, `r-cran-janeaustenr` from R's lazy-load database.
"""

import re
import subprocess
import zlib
from pathlib import Path
from typing import Final

NOVELS: Final = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
_CHAPTER: Final = re.compile(r"chapter [0-9ivxlc]+\.?", re.IGNORECASE)
_VERSE: Final = re.compile(r"(\S+?)(\d+):(\d+) (.*)")
_HELD_OUT_EVERY: Final = 20


def read_bible(command: str = "bible") -> list[str]:
    """Return the chapters of the King James Bible, printed by the `bible` command; each is one paragraph a verse."""
    printed = subprocess.run([command, "-f", "Ge1:1-Rev22:21"], check=True, capture_output=True, text=True).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in printed.splitlines():
        match = _VERSE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"the bible command printed a line that is no verse: {line!r}")
        chapters.setdefault((match[1], match[2]), []).append(match[4])
    return ["\n".join(verses) for verses in chapters.values()]


def read_novels(folder: Path) -> list[str]:
    """Return the chapters of six novels from the package's `data` folder, one line a paragraph.

    R keeps each object as a zlib-compressed serialisation in `Rdata.rdb`, at the place that `Rdata.rdx` gives.
    """
    import rdata

    places = rdata.read_rds(folder / "Rdata.rdx")["variables"]
    database = (folder / "Rdata.rdb").read_bytes()
    chapters: list[str] = []
    for novel in NOVELS:
        start, length = (int(number) for number in places[novel])
        # Four bytes of uncompressed length precede the compressed data.
        serialised = zlib.decompress(database[start + 4 : start + length])
        lines = rdata.conversion.convert(rdata.parser.parse_data(serialised, extension=".rds"))
        chapters += _split_chapters([str(line) for line in lines])
    return chapters


def _split_chapters(lines: list[str]) -> list[str]:
    chapters: list[list[str]] = [[]]
    paragraph: list[str] = []
    for line in [*lines, ""]:
        stripped = " ".join(line.split())
        if stripped and not _CHAPTER.fullmatch(stripped):
            paragraph.append(stripped)
            continue
        if paragraph:
            chapters[-1].append(" ".join(paragraph))
            paragraph = []
        if stripped:
            chapters.append([])
    # What precedes the first chapter is the title page.
    return ["\n".join(chapter) for chapter in chapters[1:] if chapter]


def split_held_out(chapters: list[str]) -> tuple[list[str], list[str]]:
    """Return (training chapters, held-out chapters): every twentieth chapter is held out."""
    held_out = chapters[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY]
    kept = [text for place, text in enumerate(chapters) if place % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2]
    return kept, held_out
