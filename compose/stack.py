"""One running compose project: its containers, their health, and how to hurt them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from compose.client import Client
from compose.docker import Docker
from compose.problem import ComposeError

FILE: Final = Path(__file__).resolve().parent / "compose.yaml"
IMAGE: Final = "pdmesh-smoke"

_LABEL: Final = "com.docker.compose.project"
_POLL_S: Final = 0.1
_LOG_LINES: Final = 40

# Kills what the init process runs, as a crash would: a container that `docker kill` ends is not started again by docker.
_CRASH: Final = (
    "import os; pids = open('/proc/1/task/1/children').read().split(); [os.kill(int(pid), 9) for pid in pids]"
)


class Stack:
    """A compose project of its own name and ports, with one profile."""

    def __init__(self, docker: Docker, *, profile: str, build_environ: dict[str, str]) -> None:
        self._profile = profile
        self._name = f"pdmesh-smoke-{profile}"
        port, nats_port = _free_ports(2)
        ports = {"PORT": str(port), "NATS_PORT": str(nats_port)}
        self._docker = Docker({**docker.environ, **build_environ, **ports, "IMAGE": IMAGE, "COMPOSE_PROFILES": ""})
        self.client: Final = Client(f"http://127.0.0.1:{port}")
        self.nats_url: Final = f"nats://127.0.0.1:{nats_port}"

    def __str__(self) -> str:
        return self._profile

    def build(self) -> None:
        """Build the image. Raises ComposeError."""
        self._compose("build", timeout_s=1800.0)

    @contextlib.contextmanager
    def running(self, timeout_s: float) -> Iterator[None]:
        """Start everything, wait until it is healthy, and take it down again. Raises ComposeError, with logs when it fails."""
        try:
            self._compose("up", "--detach", "--wait", "--wait-timeout", str(int(timeout_s)), timeout_s=timeout_s + 60)
            yield
        except BaseException:
            print(self._compose("logs", "--no-color", "--tail", str(_LOG_LINES)))
            raise
        finally:
            self._compose("down", "--volumes", "--timeout", "10")

    def stop(self) -> dict[str, int]:
        """Stop all services in order; the exit status of each."""
        self._compose("stop")
        return {service: int(self.state(service)["ExitCode"]) for service in self.services}

    @property
    def services(self) -> tuple[str, ...]:
        """The services of this profile."""
        return tuple(sorted(self._compose("config", "--services").split()))

    def inspect(self, service: str) -> dict[str, Any]:
        """What the daemon knows about a service's container."""
        (container,) = self._compose("ps", "--all", "--quiet", service).split()
        return self._docker.inspect(container)

    def state(self, service: str) -> dict[str, Any]:
        """The state of a service's container."""
        found: dict[str, Any] = self.inspect(service)["State"]
        return found

    def started_at(self) -> dict[str, str]:
        """When each container was last started."""
        return {service: str(self.state(service)["StartedAt"]) for service in self.services}

    def execute(self, service: str, *command: str) -> str:
        """Run a command in a service's container."""
        return self._compose("exec", "--no-TTY", service, *command)

    def probe(self, service: str, path: str) -> bool:
        """Whether a service that runs answers 200 at `path`, asked as its own health check asks."""
        *program, _ = self.inspect(service)["Config"]["Healthcheck"]["Test"][1:]
        with contextlib.suppress(ComposeError):
            self.execute(service, *program, path)
            return True
        return False

    def crash(self, service: str) -> None:
        """Kill the service's process, not its container: its restart policy starts it again."""
        with contextlib.suppress(ComposeError):  # the exec ends with the container
            self.execute(service, "python", "-IS", "-c", _CRASH)

    def kill(self, service: str) -> None:
        """Kill the container; it stays down until `start`."""
        self._compose("kill", "--signal", "KILL", service)

    def start(self, service: str) -> None:
        """Start a container that is down."""
        self._compose("start", service)

    def restart(self, service: str) -> None:
        """Stop the service in order and start it again."""
        self._compose("restart", "--no-deps", service)

    def await_back(self, service: str, since: str, timeout_s: float) -> None:
        """Wait until the service runs again, started later than `since`, and is healthy, and the whole mesh is ready."""
        self.wait(f"{service} to be started again", lambda: self._is_back(service, since), timeout_s)
        self.await_ready(timeout_s)

    def await_ready(self, timeout_s: float) -> None:
        """Wait until the router says that the mesh can serve."""
        self.wait("the router to be ready", lambda: self.client.status("/ready") == 200, timeout_s)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `holds`. Raises ComposeError with what is known by then."""
        started = time.perf_counter()
        while not holds():
            if time.perf_counter() - started > timeout_s:
                ready = self.client.get("/ready")
                shown = self._compose("ps", "--all")
                raise ComposeError(f"waited {timeout_s:.0f} s for {what}; the router says: {ready}\n{shown}")
            time.sleep(_POLL_S)

    def leftovers(self) -> list[str]:
        """What of the project is still there: containers, volumes, networks."""
        label = f"label={_LABEL}={self._name}"
        found = self._docker("ps", "--all", "--filter", label, "--format", "container {{.Names}}").splitlines()
        for kind in ("volume", "network"):
            found += self._docker(kind, "ls", "--filter", label, "--format", f"{kind} {{{{.Name}}}}").splitlines()
        return found

    def _is_back(self, service: str, since: str) -> bool:
        state = self.state(service)
        return bool(
            state["Running"] and str(state["StartedAt"]) != since and state.get("Health", {}).get("Status") == "healthy"
        )

    def _compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        project = ("compose", "--file", str(FILE), "--project-name", self._name, "--profile", self._profile)
        return self._docker(*project, *arguments, timeout_s=timeout_s)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
