"""What a worker's own process may rely on: it never loads torch, and the fork server's preloads exist."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from common.engine.ranks.launch import PRELOADED

GROUP_SIGNALLED = """
import os, signal, socket
from multiprocessing import forkserver
from common.engine.ranks.datagrams import Joiner, split
from common.engine.ranks.launch import ProcessLauncher
from contracts.rank import Done, StopRank
from contracts.rank_codec import decode_message, encode

signal.signal(signal.SIGTERM, signal.SIG_IGN)
pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
launcher = ProcessLauncher()
handles = launcher.launch([there for _, there in pairs])
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
for pid in (forkserver._forkserver._forkserver_pid, *(handle._process.pid for handle in handles)):
    os.kill(pid, signal.SIGTERM)
for (here, there), handle in list(zip(pairs, handles))[:1]:
    there.close()
    here.settimeout(60)
    for datagram in split(encode(StopRank())):
        here.send(datagram)
    assert isinstance(decode_message(Joiner().put(here.recv(1 << 18))), Done)
    assert handle.join(60)
    assert handle._process.exitcode == 0
print("left:", *(handle._process.pid for handle in handles[1:]))
"""


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


def test_a_signal_to_the_whole_process_group_ends_neither_ranks_nor_fork_server() -> None:
    """A rank ends when it is told to, with status 0; one that nobody has told is gone when its parent has ended."""
    done = subprocess.run(
        [sys.executable, "-c", GROUP_SIGNALLED], check=True, timeout=120, stdout=subprocess.PIPE, text=True
    )
    (left,) = done.stdout.removeprefix("left:").split()
    assert not Path(f"/proc/{left}").exists()
