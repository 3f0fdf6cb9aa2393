"""The docker command line, on the daemon that the smoke test uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compose.shell import DEFAULT_TIMEOUT_S, run, succeeds


class Docker:
    """`docker` with an environment of its own: which daemon, and where plug-ins are."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)

    def __call__(self, *arguments: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Run `docker ARGUMENTS` and return what it printed. Raises ComposeError."""
        return run(["docker", *arguments], environ=self.environ, timeout_s=timeout_s)

    @property
    def answers(self) -> bool:
        """Whether there is a daemon."""
        return succeeds(["docker", "version"], environ=self.environ)

    @property
    def has_compose(self) -> bool:
        """Whether compose version 2 is installed: version 1 has no plug-in."""
        return succeeds(["docker", "compose", "version"], environ=self.environ)

    def has_image(self, name: str) -> bool:
        """Whether the daemon has an image of this name."""
        return succeeds(["docker", "image", "inspect", name], environ=self.environ)

    def inspect(self, container: str) -> dict[str, Any]:
        """Everything the daemon knows about a container."""
        found: list[dict[str, Any]] = json.loads(self("inspect", container))
        return found[0]
