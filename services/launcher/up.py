"""`pdmesh up`: a mesh that serves until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from contracts import subjects
from services.launcher.console import Console
from services.launcher.mesh import RunningMesh


class Up:
    """Tells people how to use a mesh that is ready, and lets it serve."""

    def __init__(self, console: Console, model_name: str) -> None:
        self._console = console
        self._model_name = model_name

    async def __call__(self, mesh: RunningMesh) -> None:
        """Runs until it is cancelled: its end is the operator's to say, so it has no deadline."""
        self._console.show(announcement(mesh, self._model_name, called_as(sys.argv)))
        await asyncio.Event().wait()


def called_as(argv: Sequence[str]) -> str:
    """How a shell calls this program again: by the path it was called by, which need not be on PATH."""
    program = Path(argv[0])
    if program.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m services.launcher"
    return shlex.quote(argv[0])


def announcement(mesh: RunningMesh, model_name: str, pdmesh: str) -> str:
    """Where the mesh is, and lines to paste: a request, and what shows its events. `pdmesh` is how the shell calls us."""
    body = {"model": model_name, "stream": True, "messages": [{"role": "user", "content": "In the beginning"}]}
    server = shlex.quote(without_credentials(mesh.nats_url))
    nats = f"nats --server {server}"
    return "\n".join(
        (
            f"pdmesh serves {mesh.url}",
            f"  curl -N {mesh.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
            "what happens to its handoffs:",
            f"  {nats} sub '{subjects.EVENTS_FILTER}'",
            f"  {nats} stream view {subjects.EVENTS_STREAM}",
            f"  {nats} kv watch {subjects.HANDOFFS_BUCKET}",
            f"  {nats} kv get {subjects.LEASES_BUCKET} broker.0",
            f"  {nats} kv watch {subjects.LINKS_BUCKET}",
            "the same without the nats tool (ID is the id of a completion, or a handoff's own):",
            f"  {pdmesh} events --all --nats {server}",
            f"  {pdmesh} links --nats {server}",
            f"  {pdmesh} timeline ID --nats {server}",
            f"  {pdmesh} handoff ID --nats {server}",
            "Ctrl-C stops it.",
        )
    )


def without_credentials(url: str) -> str:
    """The URL without the user and password that it may hold."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
