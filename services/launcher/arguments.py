"""The command line of `pdmesh`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from common.runtime.settings import ROLES
from services.launcher.core.presets import PRESETS, Preset
from services.launcher.plan import WORKER_ROLES, MeshRequest

_CHECKOUT: Final = Path(__file__).resolve().parents[2]
SHIPPED_MODEL: Final = _CHECKOUT / "models" / "tiny"
_DEMO_WORKERS: Final = (("prefill", "tp=2"), ("decode", "tp=1"))
_SPEC_HELP: Final = "one {role} worker, as key=value,key=value (tp=2,block_size=16; id=NAME names it); may be repeated"


class _Worker(argparse.Action):
    """Keeps workers of all roles in one list, in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        workers = [*(getattr(namespace, self.dest) or ()), ((option_string or "").removeprefix("--"), values or "")]
        setattr(namespace, self.dest, workers)


class _Parser(argparse.ArgumentParser):
    """Takes no option for another of which it is the beginning, and refuses unknown words with the usage of the command that they follow.

    argparse makes its subparsers of the same class.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """The parser. Its result has `command`, and for `up` and `demo` what `mesh_request` reads."""
    root = _Parser(prog="pdmesh", description="Prefill and decode on separate workers.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start a mesh on this machine and serve until Ctrl-C")
    _add_up(up)
    _add_up(
        commands.add_parser(
            "check-config", help="say what up would refuse or warn of, and what to change; start nothing"
        )
    )
    demo = commands.add_parser(
        "demo", help="start a small mesh, ask it two things, show how its handoffs went, stop it"
    )
    _add_mesh(demo)
    timeline = commands.add_parser("timeline", help="show how a request went, from the event stream alone")
    timeline.add_argument("name", metavar="ID", help="of a completion (cmpl-...), a request, a handoff or a trace")
    handoff = commands.add_parser("handoff", help="show who owns what of a handoff now, and what has not arrived")
    handoff.add_argument("name", metavar="ID", help="of a completion (cmpl-...), a request or a handoff")
    events = commands.add_parser("events", help="follow what happens to handoffs and links")
    events.add_argument("--all", action="store_true", help="first show what the stream has kept")
    links = commands.add_parser("links", help="show how prefill and decode workers stand with each other, and why")
    change = commands.add_parser("set", help="change a setting of a worker while it runs")
    change.add_argument("worker", metavar="WORKER", help="its id")
    change.add_argument(
        "setting", metavar="KEY=VALUE", help="parallel_shard_pull=0 of a decode worker, log_level=debug"
    )
    _add_plan(
        commands.add_parser("plan", help="what a pair of workers of some sizes would hold and move; starts nothing")
    )
    settings = commands.add_parser("settings", help="list what services can be told: defaults, bounds, variables")
    settings.add_argument(
        "role", nargs="?", choices=ROLES, metavar="ROLE", help=f"one of {', '.join(ROLES)}; all without it"
    )
    for each in (timeline, handoff, events, links, change):
        each.add_argument(
            "--nats", metavar="URL", help="the NATS server (default: PD_NATS_URL, or the local port 4222)"
        )
    return root


def mesh_request(arguments: argparse.Namespace) -> MeshRequest:
    """What `up` or `demo` was asked for. The demo fills in the shipped checkpoint, and its two workers unless a preset names some."""
    model, workers = arguments.model, tuple(arguments.workers or ())
    preset = preset_of(arguments)
    if arguments.command == "demo":
        model = model or str(SHIPPED_MODEL)
        workers = workers or (() if preset else _DEMO_WORKERS)
    return MeshRequest(
        model=model,
        workers=workers,
        port=arguments.port,
        overrides=tuple(arguments.overrides),
        config_file=arguments.config,
        preset=preset,
        # A demo that goes on after a death would hide what it is to show.
        restart=arguments.command != "demo" and not arguments.no_restart,
    )


def preset_of(arguments: argparse.Namespace) -> Preset | None:
    """The preset that was named, if one was."""
    return None if arguments.preset is None else PRESETS[arguments.preset]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv` (the process's own by default). Exits with status 2 and a usage line for what it does not know."""
    return parser().parse_args(argv)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", metavar="DIR", required=True, help="a folder with a config.json; weights are not read"
    )
    for role in ("prefill", "decode"):
        help_text = f"the {role} worker's settings, as key=value,key=value (tp, dp, dcp, dtype, block_size ...)"
        command.add_argument(f"--{role}", default="", metavar="SPEC", help=help_text)
    command.add_argument(
        "--memory", metavar="SIZE", help="of each rank (64GiB), for weights and caches: tells what fits"
    )
    command.add_argument(
        "--tokens", type=int, metavar="N", help="of a request (default: 32768, or what the model can hold)"
    )
    _add_preset(command)
    command.add_argument("--json", action="store_true", help="print the same as one JSON object")
    command.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="a setting of both workers"
    )


def _add_up(command: argparse.ArgumentParser) -> None:
    _add_mesh(command)
    command.add_argument(
        "--no-restart", action="store_true", help="end the mesh when a service dies, instead of starting it again"
    )
    command.add_argument("--dump", action="store_true", help="print the effective settings as JSON and start nothing")


def _add_mesh(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="DIR", help="the checkpoint")
    for role in WORKER_ROLES:
        help_text = _SPEC_HELP.format(role=role)
        command.add_argument(f"--{role}", nargs="?", action=_Worker, dest="workers", metavar="SPEC", help=help_text)
    _add_preset(command)
    command.add_argument("--port", type=int, metavar="PORT", help="of the HTTP server (up: 8000; demo: a free one)")
    command.add_argument("--config", type=Path, metavar="FILE", help="settings as JSON")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="[ROLE.]KEY=VALUE",
        help="a setting of every service that knows it, or of one role (pdmesh settings lists them); may be repeated",
    )


def _add_preset(command: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{each.name}: {each.text}" for each in PRESETS.values())
    command.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help=f"workers and settings that have a name; what is given beside it wins. {presets}",
    )
