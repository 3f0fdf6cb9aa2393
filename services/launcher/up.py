"""`pdmesh up`: a mesh that serves until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import shlex

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
        self._console.show(announcement(mesh, self._model_name))
        await asyncio.Event().wait()


def announcement(mesh: RunningMesh, model_name: str) -> str:
    """Where the mesh is, and lines to paste: a request, and what shows its events."""
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
            f"  pdmesh events --nats {server}",
            f"  pdmesh links --nats {server}",
            f"  pdmesh timeline HANDOFF --nats {server}",
            "Ctrl-C stops it.",
        )
    )


def without_credentials(url: str) -> str:
    """The URL without the user and password that it may hold."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
