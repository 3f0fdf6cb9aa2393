"""`pdmesh demo`, for real: the shipped checkpoint, two prefill ranks, one decode rank, every byte over the mesh."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.launcher_traces import Commands, Traces

_LIMIT_S = 180.0
_PHASES = ("request submitted", "decode reserved", "prefill started", "push, rank 0", "push, rank 1", "taken over")


def test_the_demo_answers_explains_itself_and_leaves_nothing(traces: Traces, commands: Commands) -> None:
    """Two requests are answered, the stream tells how each was handed over, and afterwards no trace is left."""
    result = subprocess.run(
        commands.pdmesh("demo"), capture_output=True, text=True, check=False, timeout=_LIMIT_S, env=traces.environ
    )
    assert result.returncode == 0, result.stderr
    talk, *tables = result.stdout.split("\nhandoff ")
    answers = re.findall(r"^(?:chat|completion): [^\n]+\n> (.+?)(?=\n\n|\Z)", talk, flags=re.MULTILINE | re.DOTALL)
    assert len(answers) == 2
    assert all(answer.strip() for answer in answers)
    assert len(tables) == 2
    for table in tables:
        heading, *_ = table.splitlines()
        assert re.fullmatch(r"r[0-9a-f]{20}-0: prefill-0 -> decode-0, finished \((stop|length)\)", heading)
        assert [phase for phase in _PHASES if phase not in table] == []
        moved = re.search(r"moved +([0-9,]+) bytes in ([0-9,]+) parts", table)
        assert moved is not None
        assert all(int(number.replace(",", "")) > 0 for number in moved.groups())
        assert re.search(r"overlap +[0-9]+% of the push time", table)
        assert re.search(r"handoff gap +[0-9.]+ ms", table)
        assert len(re.findall(r"^ +total .*[0-9.]+$", table, flags=re.MULTILINE)) == 1
    assert traces.left() == []
