"""The text is read chapter by chapter, without what is not text."""

from pathlib import Path

import pytest

from models.tiny.corpus import _split_chapters, read_bible
from models.tiny.train import learning_rate_at


def make_command(folder: Path, lines: list[str]) -> str:
    """Return a command that prints these lines, as `bible` would."""
    command = folder / "bible"
    command.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    command.chmod(0o755)
    return str(command)


def test_bible_is_grouped_by_chapter(tmp_path: Path) -> None:
    """Verses of one chapter become its paragraphs, without their numbers; books whose names begin with a digit are no exception."""
    command = make_command(tmp_path, ["1Sam1:1 Now there was", "1Sam1:2 And he had", "1Sam2:1 And Hannah prayed"])
    assert read_bible(command) == ["Now there was\nAnd he had", "And Hannah prayed"]


def test_line_that_is_no_verse_is_refused(tmp_path: Path) -> None:
    """A message of the command is not learned as if it were text."""
    with pytest.raises(ValueError, match="no verse: 'unknown book'"):
        read_bible(make_command(tmp_path, ["unknown book"]))


def test_novel_is_cut_at_chapter_headings() -> None:
    """The title page goes, paragraphs are joined to lines, and a sentence that speaks of chapters is no heading."""
    lines = [
        "EMMA",
        "",
        "CHAPTER I",
        "",
        "Emma  Woodhouse,",
        "handsome.",
        "",
        "She",
        "Chapter 2",
        "the following chapters",
        "end",
    ]
    assert _split_chapters(lines) == ["Emma Woodhouse, handsome.\nShe", "the following chapters end"]


def test_learning_rate_warms_up_holds_and_falls() -> None:
    """It starts at a fiftieth, is whole from step 50 until the fall begins, and ends near a twentieth."""
    assert learning_rate_at(0, 1000, 0.75) == 1 / 50
    assert learning_rate_at(49, 1000, 0.75) == learning_rate_at(749, 1000, 0.75) == 1
    assert learning_rate_at(875, 1000, 0.75) == pytest.approx(0.525)
    assert learning_rate_at(999, 1000, 0.75) == pytest.approx(0.05, abs=0.005)
