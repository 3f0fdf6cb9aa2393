"""A mesh that serves, as people meet it: its HTTP port, its event stream, its death."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime.clock import Deadline, SystemClock

if TYPE_CHECKING:
    from tests.e2e.launcher_traces import Commands, Traces
    from tests.e2e.mesh_probe import Probe

_LIMIT_S = 120.0


def _complete(pair: Probe, prompt: str) -> tuple[str, str]:
    """The answer's id and its text."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(  # noqa: S310 - the URL is our own
        f"{pair.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:  # noqa: S310 - the URL is our own
        answer = json.load(response)
    return str(answer["id"]), str(answer["choices"][0]["text"])


def _run(command: list[str], environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S, env=environ)


def test_a_running_mesh_answers_alike(pair: Probe) -> None:
    """Greedy answers to one prompt are equal, and there is text in them."""
    _, first = _complete(pair, "In the beginning God created")
    assert first.strip()
    _, second = _complete(pair, "In the beginning God created")
    assert second == first


def test_a_request_can_be_looked_up_afterwards(pair: Probe, commands: Commands) -> None:
    """`pdmesh events` shows its events as they come, and `pdmesh timeline` how it went, by handoff and by request."""
    ignoring = ("env", "--ignore-signal=INT")  # as a shell starts its background jobs
    following = subprocess.Popen(
        [*ignoring, *commands.pdmesh("events", "--all", "--nats", pair.mesh.nats_url)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    known_as, _ = _complete(pair, "And it came to pass")
    request = known_as.removeprefix("cmpl-")
    # The stream has the requests of other tests, too.
    finished = next(line for line in following.stdout if "  request_finished  " in line and request in line)
    following.send_signal(signal.SIGINT)
    following.stdout.read()
    following.stdout.close()
    assert following.wait(_LIMIT_S) == 130
    handoff = finished.split()[1]
    by_handoff = _run(commands.pdmesh("timeline", handoff, "--nats", pair.mesh.nats_url))
    assert handoff == f"{request}-0"
    by_request = _run(commands.pdmesh("timeline", known_as, "--nats", pair.mesh.nats_url))
    assert by_handoff.returncode == by_request.returncode == 0, by_handoff.stderr + by_request.stderr
    for shown in (by_handoff.stdout, by_request.stdout):
        assert shown.startswith(f"handoff {handoff}: prefill-0 -> decode-0, finished (")
        assert re.search(r"handoff gap +[0-9.]+ ms", shown)


def test_a_killed_launcher_takes_its_mesh_with_it(traces: Traces, commands: Commands) -> None:
    """SIGKILL leaves no time to clean up: the processes go all the same, and the next start sweeps up the files."""
    clock = SystemClock()
    with subprocess.Popen(
        commands.pdmesh("up", *commands.small_mesh()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=traces.environ,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith("pdmesh serves http://127.0.0.1:")
        assert len(traces.processes()) >= 7  # launcher, server, broker, router, two workers, ranks
        launcher.kill()
    deadline = Deadline.after(clock, _LIMIT_S)
    while traces.processes() and not deadline.passed:
        os.sched_yield()
    assert traces.processes() == []
    assert len(list(traces.folder.iterdir())) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = _run(commands.pdmesh("up", *commands.small_mesh(), "--port", str(port)), traces.environ)
    assert f"port: {port} is taken" in refused.stderr
    assert traces.left() == []


def test_a_worker_that_is_killed_ends_the_mesh_with_a_reason(traces: Traces, commands: Commands) -> None:
    """With `--no-restart`, a worker that cannot go on is named with the end of its log, the rest is stopped, and the status is 1."""
    with subprocess.Popen(
        # Of what ranks do when their worker dies tells the test above.
        commands.pdmesh("up", "--no-restart", "--set", "engine=fake", *commands.small_mesh()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=traces.environ,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        launcher.stdout.readline()
        (worker,) = [
            pid for pid in traces.processes() if b"services.decode" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(worker, signal.SIGKILL)
        said = launcher.stderr.read()
    assert launcher.returncode == 1
    assert "decode-0 was killed by signal 9" in said
    assert traces.processes() == []
