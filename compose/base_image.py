"""A base image for machines that reach a Debian mirror but no image registry. It is for tests: never push it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from compose.docker import Docker
from compose.mirror import mirror_url
from compose.problem import ComposeError
from compose.shell import run

LOCAL_NAME: Final = "local/python:3.11-slim"

_SUITE: Final = "bookworm"
_PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_LEFT_OUT: Final = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
_TIMEOUT_S: Final = 900.0


def make_base_image(docker: Docker) -> str:
    """The name of a local image with Python 3.11 and venv; made by debootstrap if it is not there yet."""
    if docker.has_image(LOCAL_NAME):
        return LOCAL_NAME
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise ComposeError("no base image: give one as BASE_IMAGE, or be root with debootstrap installed")
    with tempfile.TemporaryDirectory(prefix="pdmesh-base-") as made:
        root = Path(made) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root), mirror_url()]
        run(command, timeout_s=_TIMEOUT_S)
        for name in _LEFT_OUT:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        for mark in root.glob("usr/lib/python3.*/EXTERNALLY-MANAGED"):
            mark.unlink()
        # The host's own authorities: a machine without a registry often reaches its package index through a proxy.
        if _CERTIFICATES.is_file():
            shutil.copyfile(_CERTIFICATES, root / _CERTIFICATES.relative_to("/"))
        _import(docker, root)
    return LOCAL_NAME


def _import(docker: Docker, root: Path) -> None:
    """Hand the tree over as an image, without a file in between."""
    packing = ["tar", "-C", str(root), "--numeric-owner", "-c", "."]
    with subprocess.Popen(packing, stdout=subprocess.PIPE) as tar:
        command = ["docker", "import", "--change", 'CMD ["python3"]', "-", LOCAL_NAME]
        done = subprocess.run(
            command,
            stdin=tar.stdout,
            env=docker.environ,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if tar.returncode or done.returncode:
        raise ComposeError(f"the base image could not be imported: {done.stderr.strip()}")
