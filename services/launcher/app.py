"""Puts the launcher together, and gives each outcome its exit status: 0 good, 1 failed, 2 wrong settings, 130 interrupted."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Final, assert_never

from common.bus.errors import BusUnavailable
from common.bus.port import Bus
from common.runtime.clock import SystemClock
from common.runtime.settings import SettingsError, environment
from contracts.errors import PdmeshError
from services.launcher.arguments import mesh_request, parse, preset_of
from services.launcher.bus import with_bus
from services.launcher.console import Console
from services.launcher.demo import Demo
from services.launcher.live_setting import change_setting
from services.launcher.mesh import Body, MeshRun
from services.launcher.plan import MeshPlan, check_mesh, make_plan
from services.launcher.ports import free_ports
from services.launcher.settings import settings_structs
from services.launcher.show import follow_events, show_links, show_settings, show_timeline
from services.launcher.show_check import render_check
from services.launcher.show_estimate import EstimateRequest, show_estimate
from services.launcher.show_handoff import show_handoff
from services.launcher.up import Up

EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2
EXIT_INTERRUPTED: Final = 130

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULT_NATS: Final = "nats://127.0.0.1:4222"


def run(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (the process's own by default) asks for, and return the exit status."""
    arguments = parse(argv)
    console = Console(SystemClock())
    try:
        match arguments.command:
            case "up":
                return _up(arguments, console)
            case "check-config":
                return _check(arguments, console)
            case "demo":
                return _demo(arguments, console)
            case "plan":
                return _estimate(arguments, console)
            case "settings":
                return show_settings(arguments.role, console)
            case "timeline" | "handoff" | "events" | "links" | "set":
                return asyncio.run(_inspect(arguments, console))
            case unknown:
                assert_never(unknown)
    except SettingsError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except PdmeshError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED


def _up(arguments: argparse.Namespace, console: Console) -> int:
    plan = _plan(arguments)
    if arguments.dump:
        console.show(plan.dump())
        return EXIT_CLEAN
    status, _ = _live(plan, Up(console, plan.workers[0].settings.value.model_name), console)
    return status


def _check(arguments: argparse.Namespace, console: Console) -> int:
    check = check_mesh(mesh_request(arguments), settings_structs(), environment())
    if arguments.dump and check.plan is not None:
        console.show(check.plan.dump())
    else:
        console.show(render_check(check))
    return EXIT_SETTINGS if check.plan is None else EXIT_CLEAN


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.port is None:
        (arguments.port,) = free_ports(1)
    status, interrupted = _live(_plan(arguments), Demo(console, SystemClock()), console)
    return EXIT_INTERRUPTED if interrupted and status == EXIT_CLEAN else status


def _estimate(arguments: argparse.Namespace, console: Console) -> int:
    request = EstimateRequest(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        memory=arguments.memory,
        num_tokens=arguments.tokens,
        overrides=tuple(arguments.overrides),
        preset=preset_of(arguments),
    )
    return show_estimate(request, environment(), console, as_json=arguments.json)


def _plan(arguments: argparse.Namespace) -> MeshPlan:
    return make_plan(mesh_request(arguments), settings_structs(), environment())


def _live(plan: MeshPlan, body: Body, console: Console) -> tuple[int, bool]:
    """Live one mesh; return the exit status and whether it was interrupted."""
    for line in (*planted_faults(plan), *cautions(plan)):
        console.say(line)
    mesh = MeshRun(plan, body, clock=SystemClock(), console=console, environ=environment())
    return asyncio.run(mesh.run()), mesh.interrupted


def planted_faults(plan: MeshPlan) -> Iterator[str]:
    """A line for each worker that spoils its own transfers on purpose."""
    for worker in plan.workers:
        failpoints = worker.settings.value.failpoints
        if failpoints.strip():
            yield f"{worker.name} plants faults on purpose (failpoints): {failpoints}"


def cautions(plan: MeshPlan) -> Iterator[str]:
    """A line for each thing that an operator should know of a worker's settings."""
    for worker in plan.workers:
        for caution in () if worker.verdict is None else worker.verdict.cautions:
            yield f"{worker.name}: {caution.text}; {caution.remedy} ({caution.name})"


async def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    async def use(bus: Bus) -> int:
        if arguments.command == "timeline":
            return await show_timeline(bus, arguments.name, console)
        if arguments.command == "handoff":
            return await show_handoff(bus, arguments.name, console)
        if arguments.command == "set":
            return await change_setting(bus, arguments.worker, arguments.setting, console)
        if arguments.command == "links":
            return await show_links(bus, console)
        await follow_events(bus, console, from_start=arguments.all)
        return EXIT_CLEAN

    task = asyncio.current_task()
    if task is None:
        raise AssertionError("a coroutine that `asyncio.run` runs is a task")
    for number in _SIGNALS:
        # Set by hand: a shell's background job starts with SIGINT ignored, and Python then leaves it so.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    url = arguments.nats or environment().get("PD_NATS_URL") or _DEFAULT_NATS
    try:
        return await with_bus(url, use, say=console.say)
    except BusUnavailable as error:
        if url != _DEFAULT_NATS:
            raise
        text = f"{error.message}; name the mesh's server with --nats URL: pdmesh up prints it"
        raise BusUnavailable(text, maybe_done=error.maybe_done) from error
