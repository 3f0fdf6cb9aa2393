"""`python -m compose.smoke [PROFILE ...]`: the compose stack on real containers. What `make test-compose` runs.

It uses the docker daemon that answers; without one, as root on Debian, a daemon of its own (see `private_daemon`), with a
base image from the machine's package mirror. BASE_IMAGE and TORCH_INDEX may be set as for a build by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Final

from common.runtime.settings import environment
from compose.base_image import make_base_image
from compose.checks import check_containers, check_requests
from compose.docker import Docker
from compose.events import check_handoff
from compose.mirror import install_plugin
from compose.outages import check_outages, check_stop
from compose.private_daemon import private_daemon
from compose.problem import ComposeError
from compose.shell import run
from compose.stack import IMAGE, Stack

PROFILES: Final = ("shm", "tcp")

_WHEELS: Final = Path(__file__).resolve().parent / "wheels"
_CPU_BUILD: Final = "+cpu"
_UP_TIMEOUT_S: Final = 180.0
_KEPT_CACHE: Final = "6GB"


def main() -> int:
    """Answer the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help=f"of {', '.join(PROFILES)}; all of them if none")
    parser.add_argument(
        "--data", type=Path, default=_default_data(), help="where a daemon of our own keeps its images between runs"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.profiles) - set(PROFILES)
    if unknown:
        parser.error(f"PROFILE: {', '.join(sorted(unknown))} is not one of {', '.join(PROFILES)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    started = time.perf_counter()
    try:
        with _docker(arguments.data) as (docker, is_ours):
            _run(docker, arguments.profiles or PROFILES, is_ours=is_ours)
    except ComposeError as error:
        print(f"compose: {error}", file=sys.stderr)
        return 1
    print(f"compose: all checks hold; {time.perf_counter() - started:.0f} s in all")
    return 0


def _run(docker: Docker, profiles: Sequence[str], *, is_ours: bool) -> None:
    build_environ = {name: docker.environ.get(name, "") for name in ("BASE_IMAGE", "TORCH_INDEX")}
    started = time.perf_counter()
    start = "warm" if docker.has_image(IMAGE) else "cold"
    if is_ours and not build_environ["BASE_IMAGE"]:  # a machine without a daemon seldom reaches an image registry
        build_environ["BASE_IMAGE"] = make_base_image(docker)
    if not build_environ["TORCH_INDEX"]:
        _fetch_torch()
    Stack(docker, profile=profiles[0], build_environ=build_environ).build()
    if is_ours:  # what earlier builds have left in it is nobody else's
        docker("image", "prune", "--force")
        docker("builder", "prune", "--force", "--keep-storage", _KEPT_CACHE)
    print(f"{start}: image built after {time.perf_counter() - started:.1f} s", flush=True)
    for profile in profiles:
        stack = Stack(docker, profile=profile, build_environ=build_environ)
        started = time.perf_counter()
        with stack.running(_UP_TIMEOUT_S):
            print(f"{profile}: healthy after {time.perf_counter() - started:.1f} s", flush=True)
            check_containers(stack)
            first = check_requests(stack)
            print(
                f"{profile}: requests answered, handoffs read after {time.perf_counter() - started:.1f} s", flush=True
            )
            check_outages(stack)
            check_handoff(stack.nats_url, first)  # NATS was killed meanwhile: what it had stored is still there
            check_stop(stack)
        left = stack.leftovers()
        if left:
            raise ComposeError(f"`down` has left {', '.join(left)}")
        print(f"{profile}: done after {time.perf_counter() - started:.1f} s", flush=True)


def _leave(number: int, _frame: FrameType | None) -> None:
    """Take everything down before the end, as for an interrupt."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _docker(data: Path) -> Iterator[tuple[Docker, bool]]:
    """A daemon that answers, with compose: the machine's, else one of our own; and whether it is ours."""
    with contextlib.ExitStack() as opened:
        docker = Docker(environment())
        is_ours = not docker.answers
        if is_ours:
            host = opened.enter_context(private_daemon(data / "docker"))
            docker = Docker({**docker.environ, "DOCKER_HOST": host, "DOCKER_CONTEXT": ""})
        if not docker.has_compose:
            config = data / "config"
            docker = Docker({**docker.environ, "DOCKER_CONFIG": str(config)})
            if not docker.has_compose:
                install_plugin(config / "cli-plugins")
        yield docker, is_ours


def _fetch_torch() -> None:
    """Let the image have the CPU build of torch that this environment has, if it has one."""
    wanted = version("torch")
    if not wanted.endswith(_CPU_BUILD) or any(_WHEELS.glob("torch-*.whl")):
        return
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(_WHEELS), f"torch=={wanted}"])


def _default_data() -> Path:
    return Path(tempfile.gettempdir()) / f"pdmesh-compose-{os.getuid()}"


if __name__ == "__main__":
    sys.exit(main())
