"""What a worker's own process may rely on: it never loads torch, and the fork server's preloads exist."""

from __future__ import annotations

import importlib
import subprocess
import sys

from common.engine.ranks.launch import PRELOADED


def test_every_preload_can_be_imported() -> None:
    """A missing preload is ignored silently by the fork server, and each rank would then load torch by itself."""
    for name in PRELOADED:
        importlib.import_module(name)


def test_the_worker_process_does_not_load_torch() -> None:
    """The engine port's adapter, the launcher and what a rank's process is pickled by work without it."""
    code = (
        "import sys, common.engine.ranks.group, common.engine.ranks.launch, common.engine.ranks.entry;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
