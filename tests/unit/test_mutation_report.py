"""The report on mutants: verdicts are read from what the tool left, and too many survivors are no success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mutation.report import Verdict, is_good, lines, main, read_verdicts


def leave(folder: Path, core: str, statuses: list[int | None], module: str = "step") -> None:
    """What mutmut writes of a module."""
    path = folder / "mutants" / core / f"{module}.py.meta"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"exit_code_by_key": {f"m{index}": status for index, status in enumerate(statuses)}}))


def test_verdicts_are_added_up_by_core(tmp_path: Path) -> None:
    """All modules of a core are one line; a time-out or a crash was noticed, what no test reaches was not."""
    leave(tmp_path, "services/a/core", [1, 1, 3, 36, -11, 0])
    leave(tmp_path, "services/a/core", [33, 5, None], module="turn")
    leave(tmp_path, "common/b/core", [])
    cores = read_verdicts(tmp_path / "mutants")
    assert cores == {
        "services/a/core": {Verdict.KILLED: 5, Verdict.SURVIVED: 1, Verdict.NO_TEST: 2, Verdict.UNTRIED: 1}
    }
    head, line = lines(cores)
    assert head.split() == ["core", "mutants", "killed", "survived", "no", "test", "untried", "share"]
    assert line.split() == ["services/a/core", "9", "5", "1", "2", "1", "62.5%"]


@pytest.mark.parametrize(
    ("statuses", "good"),
    [
        ([1] * 9 + [0], True),
        ([1] * 8 + [0, 0], False),
        ([1] * 9 + [33], True),
        ([1] * 20 + [None], False),
        ([None], False),
    ],
)
def test_nine_in_ten_are_enough_if_all_were_tried(tmp_path: Path, statuses: list[int | None], good: bool) -> None:
    """One core that falls short spoils all."""
    leave(tmp_path, "services/a/core", [1])
    leave(tmp_path, "services/b/core", statuses)
    assert is_good(read_verdicts(tmp_path / "mutants")) is good


def test_the_exit_status_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 or 1, with the table either way; no verdicts at all are an error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="mutants: no mutants; run mutmut first"):
        main()
    leave(tmp_path, "services/a/core", [1])
    assert main() == 0
    leave(tmp_path, "services/a/core", [0])
    assert main() == 1
    told = capsys.readouterr()
    assert told.out.count("services/a/core") == 2
    assert told.err == "each core is to have 90% of its mutants killed, and none untried\n"
