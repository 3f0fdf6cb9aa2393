"""What is taken from the machine's own Debian mirror: the compose plug-in, and the place to bootstrap a system from."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from compose.problem import ComposeError
from compose.shell import run

PLUGIN_SUITE: Final = "trixie"
"""The first Debian release whose compose is version 2 with `up --wait`. Its binary is static enough for older releases."""

_PLUGIN_PACKAGE: Final = "docker-compose"
_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"


def mirror_url() -> str:
    """Where this machine takes Debian's own packages from. Raises ComposeError if it does not."""
    lines = run(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(COMPONENT)|$(REPO_URI)|$(SUITE)|$(CODENAME)"])
    for line in lines.splitlines():
        origin, component, uri, suite, codename = line.split("|")
        if origin == "Debian" and component == "main" and "-" not in codename and "-" not in suite:
            return uri
    raise ComposeError("apt knows no Debian mirror with its lists loaded; run `apt-get update`, or set BASE_IMAGE")


def install_plugin(folder: Path) -> None:
    """Put the compose plug-in into `folder`, a `cli-plugins` folder of a docker configuration."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-plugin-") as made:
        work = Path(made)
        for name in ("lists/partial", "cache/archives/partial", "out"):
            (work / name).mkdir(parents=True)
        work.chmod(0o755)  # apt fetches as a user of its own
        sources = work / "sources.list"
        sources.write_text(f"deb [signed-by={_KEYRING}] {mirror_url()} {PLUGIN_SUITE} main\n", encoding="utf-8")
        apt = [
            "apt-get",
            "-qq",
            f"-oDir::Etc::sourcelist={sources}",
            "-oDir::Etc::sourceparts=/dev/null",
            f"-oDir::State::lists={work / 'lists'}",
            f"-oDir::Cache={work / 'cache'}",
            "-oAPT::Get::List-Cleanup=0",
            "-oAPT::Sandbox::User=root",
        ]
        run([*apt, "update"])
        run([*apt, "download", _PLUGIN_PACKAGE], folder=work)
        (package,) = work.glob(f"{_PLUGIN_PACKAGE}_*.deb")
        run(["dpkg", "-x", str(package), str(work / "out")])
        found = list((work / "out").rglob("cli-plugins/docker-compose"))
        if not found:
            raise ComposeError(f"the package {_PLUGIN_PACKAGE} of {PLUGIN_SUITE} holds no plug-in binary")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found[0], folder / "docker-compose")
