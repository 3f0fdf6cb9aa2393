"""The function that a rank's process starts with. Importing it loads nothing heavy: the parent pickles it by name."""

from __future__ import annotations

import gc
import socket
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path

from common.engine.collectives.passed_fd import PassedFd


def run_rank(connection: socket.socket, group: PassedFd | None) -> None:
    """Serve `connection` until the parent is gone, under the name `pdmesh-rank-N` in `top` and `ps -e`. Torch gets one thread before anything else can use it."""
    # What the fork server has loaded is shared with it. A collection would look at all of it, writing into every page, for nothing.
    gc.freeze()
    with suppress(OSError):  # elsewhere than on Linux ranks have the fork server's name
        Path("/proc/self/comm").write_text(f"pdmesh-{current_process().name}", encoding="ascii")
    import torch

    torch.set_num_threads(1)
    from common.engine.ranks.process import run

    run(connection, group)
