"""A mesh to load: started by the launcher as anybody would, on free loopback ports, and always stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from common.runtime.clock import Clock, Deadline
from common.runtime.settings import environment, parse_spec
from contracts.errors import ErrorCode, PdmeshError
from services.launcher.child import Child, ChildSpec
from services.launcher.core.presets import PRESETS
from services.launcher.plan import MeshRequest
from services.launcher.ports import free_ports
from services.launcher.readiness import lacks

_START_S: Final = 300.0
_DRAIN_S: Final = 60.0
_POLL_S: Final = 0.2
_ANSWER_S: Final = 2.0


class MeshSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. `mode` is how reports call it; `workers` holds (role, SPEC) as the launcher takes them, beside those of a `preset`."""

    mode: str
    model: Path
    workers: tuple[tuple[str, str], ...]
    preset: str = ""
    overrides: tuple[str, ...] = ()
    restart: bool = False
    """Whether a service that dies is started again; what is measured over such a death is worth nothing."""

    @property
    def all_workers(self) -> tuple[tuple[str, str], ...]:
        """Those given, and those that the preset adds."""
        preset = PRESETS[self.preset] if self.preset else None
        return MeshRequest(model=None, workers=self.workers, preset=preset).all_workers

    def worker_ids(self, role: str) -> tuple[str, ...]:
        """The ids that the launcher gives to the workers of one role: SPEC's `id`, else the role and a number."""
        found: list[str] = []
        number = 0
        for each, spec in self.all_workers:
            values = parse_spec(spec)
            given = values.get("id") or values.get("worker_id")
            if each == role:
                found.append(given or f"{role}-{number}")
                number += given is None
        return tuple(found)

    def is_disaggregated(self) -> bool:
        """Whether requests are handed over."""
        return any(role == "decode" for role, _ in self.all_workers)

    def command(self, *, port: int, nats_port: int, logs: Path) -> tuple[str, ...]:
        """The command line that starts it."""
        words = [sys.executable, "-P", "-m", "services.launcher", "up", "--model", str(self.model), "--port", str(port)]
        if self.preset:
            words += ["--preset", self.preset]
        for role, spec in self.workers:
            words += [f"--{role}", spec] if spec else [f"--{role}"]
        for override in (f"launcher.nats_port={nats_port}", f"launcher.log_dir={logs}", *self.overrides):
            words += ["--set", override]
        if not self.restart:
            words.append("--no-restart")
        return tuple(words)


class MeshFailed(PdmeshError):  # noqa: N818 - an event that ends the test
    """A mesh did not start, or ended while it was needed. The text has the end of the launcher's output."""

    code = ErrorCode.WORKER_LOST


class Mesh:
    """One running mesh. Whoever starts it stops it; it also dies with this process, however that ends."""

    def __init__(self, spec: MeshSpec, child: Child, *, url: str, nats_url: str) -> None:
        self.spec = spec
        self.url = url
        self.nats_url = nats_url
        self._child = child

    @classmethod
    async def start(
        cls,
        spec: MeshSpec,
        directory: Path,
        clock: Clock,
        say: Callable[[str], None],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Mesh:
        """Start it, with its logs in `directory`, and return once it is ready. Raises MeshFailed. `environ`: if not our own."""
        port, nats_port = free_ports(2)
        child = await Child.start(
            ChildSpec(
                name=spec.mode,
                command=spec.command(port=port, nats_port=nats_port, logs=directory),
                environ=environment() if environ is None else environ,
                log=directory / "launcher.log",
                stage=0,
                drain_s=_DRAIN_S,
            )
        )
        mesh = cls(spec, child, url=f"http://127.0.0.1:{port}", nats_url=f"nats://127.0.0.1:{nats_port}")
        say(f"starting {spec.mode}: {', '.join(filter(None, (spec.preset, _words(spec.workers))))}")
        try:
            await mesh._wait_ready(clock)
        except BaseException:
            await mesh.stop()
            raise
        return mesh

    @property
    def pid(self) -> int:
        """The process from which all others of the mesh descend."""
        return self._child.pid

    @property
    def logs(self) -> Path:
        """Where each service's log lies, as `NAME.log`."""
        return self._child.spec.log.parent

    async def stop(self) -> bool:
        """Drain it, and kill what is left; return whether it drained by itself. Twice is fine."""
        return await self._child.stop()

    def check_alive(self) -> None:
        """Raise MeshFailed if it has ended."""
        if self._child.status is not None:
            raise self._failed(f"ended with status {self._child.status}")

    def _failed(self, what: str) -> MeshFailed:
        shown = "\n".join(f"  | {line}" for line in self._child.last_lines())
        return MeshFailed(f"the mesh {self.spec.mode} {what}; the end of its output:\n{shown}")

    async def _wait_ready(self, clock: Clock) -> None:
        deadline = Deadline.after(clock, _START_S)
        lacking = "nothing said"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
            while True:
                self.check_alive()
                try:
                    async with session.get(f"{self.url}/ready") as response:
                        if response.status == HTTPStatus.OK:
                            return
                        lacking = lacks(await response.text())
                except (aiohttp.ClientError, TimeoutError):
                    lacking = "it does not answer"
                if deadline.passed:
                    raise self._failed(f"is not ready after {_START_S:.0f} s: {lacking}")
                await clock.sleep(_POLL_S)


def _words(workers: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{role} {spec}".strip() for role, spec in workers)
