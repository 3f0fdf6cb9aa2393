"""The function that a rank's process starts with. Importing it loads nothing heavy: the parent pickles it by name."""

from __future__ import annotations

import gc
import socket

from common.engine.collectives.passed_fd import PassedFd


def run_rank(connection: socket.socket, group: PassedFd | None) -> None:
    """Serve `connection` until the parent is gone. Torch gets one thread before anything else can use it."""
    # What the fork server has loaded is shared with it. A collection would look at all of it, writing into every page, for nothing.
    gc.freeze()
    import torch

    torch.set_num_threads(1)
    from common.engine.rank_process import run

    run(connection, group)
