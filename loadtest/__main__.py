"""`python -m loadtest COMMAND`: load tests of meshes on this machine, over the loopback interface alone."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

from common.runtime.clock import SystemClock
from common.runtime.settings import SettingsError
from contracts.errors import InvalidValueError, PdmeshError
from loadtest.arguments import parser
from loadtest.control import run_control
from loadtest.dataplane import run_dataplane
from loadtest.dcp import run_dcp
from loadtest.dcp_settings import DcpSettings
from loadtest.handoff import Say, run_contract, run_handoff
from loadtest.memory import run_memory
from loadtest.overlap import run_overlap
from loadtest.recall_run import run_recall
from loadtest.report import EXIT_FAILED, Machine, Report
from loadtest.settings import (
    ControlSettings,
    DataPlaneSettings,
    LoadSettings,
    MemorySettings,
    MeshSettings,
    OverlapSettings,
    RecallSettings,
    Settings,
    ShardPullSettings,
    plain,
)
from loadtest.shard_pull import run_shard_pull
from loadtest.speculate import run_speculate
from loadtest.speculate_settings import SpeculateSettings
from services.launcher.console import Console

EXIT_SETTINGS: Final = 2
EXIT_INTERRUPTED: Final = 130
_SETTINGS: Final[dict[str, Callable[..., Settings]]] = {
    "handoff": LoadSettings,
    "contract": LoadSettings,
    "recall": RecallSettings,
    "dataplane": DataPlaneSettings,
    "overlap": OverlapSettings,
    "memory": MemorySettings,
    "control": ControlSettings,
    "shard-pull": ShardPullSettings,
    "dcp": DcpSettings,
    "speculate": SpeculateSettings,
}


def run(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (the process's own by default) asks for; return 0 if nothing failed, 1, 2 for settings, 130 when interrupted."""
    arguments = vars(parser().parse_args(argv))
    command, json_file = arguments.pop("command"), arguments.pop("json")
    clock = SystemClock()
    console = Console(clock)
    try:
        settings = _settings(command, arguments)
        report = Report(command, plain(settings), Machine.here())
        if isinstance(settings, DataPlaneSettings):
            run_dataplane(settings, report, clock, console.say)
        else:
            asyncio.run(_run(settings, report, command, console.say))
    except (InvalidValueError, SettingsError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except PdmeshError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    console.show(report.text())
    if json_file is not None:
        Path(json_file).write_bytes(report.json())
    return report.status


def _settings(command: str, arguments: dict[str, Any]) -> Settings:
    values = {name: tuple(value) if name == "overrides" else value for name, value in arguments.items()}
    return _SETTINGS[command](**values)


async def _run(settings: MeshSettings, report: Report, command: str, say: Say) -> None:
    clock = SystemClock()
    task = asyncio.current_task()
    if task is not None:  # SIGTERM stops the meshes as well, in order, as Ctrl-C does
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with asyncio.timeout(settings.time_limit_s):
            match settings:
                case RecallSettings():
                    await run_recall(settings, report, clock, say)
                case OverlapSettings():
                    await run_overlap(settings, report, clock, say)
                case MemorySettings():
                    await run_memory(settings, report, clock, say)
                case ControlSettings():
                    await run_control(settings, report, clock, say)
                case ShardPullSettings():
                    await run_shard_pull(settings, report, clock, say)
                case DcpSettings():
                    await run_dcp(settings, report, clock, say)
                case SpeculateSettings():
                    await run_speculate(settings, report, clock, say)
                case LoadSettings() if command == "contract":
                    await run_contract(settings, report, clock, say)
                case LoadSettings():
                    await run_handoff(settings, report, clock, say)
                case _:
                    assert_never(settings)
    except TimeoutError as error:
        raise PdmeshError(f"not done after {settings.time_limit_s:g} s (--time-limit)") from error


if __name__ == "__main__":
    sys.exit(run())
