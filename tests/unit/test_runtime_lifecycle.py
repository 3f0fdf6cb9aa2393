"""The life of a process: order of its ends, exit statuses, signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.runtime.lifecycle import EXIT_LEASE_LAPSED, Lifecycle, ServiceEnded, State, serve
from common.runtime.settings import SettingsError, SettingsProblem
from common.runtime.virtual_time import run_virtual


class Recorder:
    """A log that remembers its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_fields: Any) -> None:
        """Remember."""
        self.events.append(event)

    def error(self, event: str, **_fields: Any) -> None:
        """Remember."""
        self.events.append(event)


def live(main: Callable[[Lifecycle], Awaitable[object]], drain_timeout_s: float = 30.0) -> tuple[int, list[str]]:
    """Run a life in virtual time; return its status and its events."""
    log = Recorder()
    status = run_virtual(lambda _clock: serve(main, log=log, drain_timeout_s=drain_timeout_s, handle_signals=False))
    return status, log.events


def steps(trace: list[str], lifecycle: Lifecycle, *names: str) -> None:
    """Register a drain and a close step per name that note the state they ran in."""

    def step(kind: str, name: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            trace.append(f"{kind} {name} {lifecycle.state}")

        return note

    for name in names:
        lifecycle.on_drain(name, step("drain", name))
        lifecycle.on_close(name, step("close", name))


def test_a_clean_life_drains_in_order_and_closes_in_reverse() -> None:
    """Start returns = ready; drains in order of registration, closes in reverse; status 0; asking twice is fine."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        async def work() -> None:
            await asyncio.sleep(1.0)
            trace.append(str(lifecycle.state))
            lifecycle.request_drain("test")
            lifecycle.request_drain("again")
            await lifecycle.wait_draining()
            await asyncio.Event().wait()

        assert lifecycle.state is State.STARTING
        steps(trace, lifecycle, "http", "bus")
        lifecycle.tasks.create_task(work(), name="work")

    status, events = live(main)
    assert status == 0
    assert trace == [
        "ready",
        "drain http draining",
        "drain bus draining",
        "close bus stopped",
        "close http stopped",
    ]
    assert events == ["service_ready", "drain_requested", "service_stopped"]


def test_a_failed_start_closes_what_was_opened_and_fails() -> None:
    """Nothing is drained, what was registered is closed, status 1."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        steps(trace, lifecycle, "bus")
        raise OSError("port taken")

    status, events = live(main)
    assert (status, trace) == (1, ["close bus stopped"])
    assert events == ["task_failed", "service_stopped"]


def test_a_drain_before_ready_ends_the_start() -> None:
    """A start that waits for something is cancelled; what it registered is drained and closed; status 0."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        steps(trace, lifecycle, "bus")
        lifecycle.tasks.create_task(_ask(lifecycle), name="ask")
        await asyncio.Event().wait()

    async def _ask(lifecycle: Lifecycle) -> None:
        await asyncio.sleep(1.0)
        lifecycle.request_drain("test")

    status, events = live(main)
    assert (status, trace) == (0, ["drain bus draining", "close bus stopped"])
    assert events == ["drain_requested", "service_stopped"]


def test_wrong_settings_exit_with_2() -> None:
    """A SettingsError of the start is told as such."""

    async def main(_lifecycle: Lifecycle) -> None:
        raise SettingsError([SettingsProblem(key="tp", value="9", rule="1 to 8")])

    assert live(main) == (2, ["settings_refused", "service_stopped"])


def test_a_failed_task_ends_the_process_with_1() -> None:
    """A task of the root group that fails stops everything, without draining."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        async def work() -> None:
            await asyncio.sleep(1.0)
            raise ValueError("planted")

        steps(trace, lifecycle, "bus")
        lifecycle.tasks.create_task(work(), name="work")

    status, events = live(main)
    assert (status, trace) == (1, ["close bus stopped"])
    assert events == ["service_ready", "task_failed", "service_stopped"]


def test_a_task_can_end_the_process_with_a_status_of_its_own() -> None:
    """What it raises says which; nothing is drained, and all is closed."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        async def work() -> None:
            await asyncio.sleep(1.0)
            raise ServiceEnded("planted", status=EXIT_LEASE_LAPSED)

        steps(trace, lifecycle, "bus")
        lifecycle.tasks.create_task(work(), name="work")

    status, events = live(main)
    assert (status, trace) == (3, ["close bus stopped"])
    assert events == ["service_ready", "service_ended", "service_stopped"]


def test_what_several_tasks_end_the_process_for_is_told_once() -> None:
    """Several notice at the same moment that the lease has lapsed: that is one cause. Another cause is told, too."""

    async def main(lifecycle: Lifecycle) -> None:
        async def work(reason: str) -> None:
            await asyncio.sleep(1.0)
            raise ServiceEnded(reason, status=EXIT_LEASE_LAPSED)

        for number, reason in enumerate(("planted", "planted", "another one")):
            lifecycle.tasks.create_task(work(reason), name=f"work-{number}")

    status, events = live(main)
    assert status == EXIT_LEASE_LAPSED
    assert events == ["service_ready", "service_ended", "service_ended", "service_stopped"]


def test_a_drain_is_bounded_and_a_broken_step_does_not_stop_the_others() -> None:
    """A step that raises is logged and the next one runs; one that hangs is cut at the timeout; both mean status 1."""
    trace: list[str] = []

    async def broken() -> None:
        raise ValueError("planted")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def main(lifecycle: Lifecycle) -> None:
        lifecycle.on_drain("broken", broken)
        steps(trace, lifecycle, "bus")
        lifecycle.on_drain("hang", hang)
        lifecycle.on_close("broken", broken)
        lifecycle.on_close("hang", hang)
        lifecycle.request_drain("test")
        await asyncio.sleep(0.1)

    status, events = live(main, drain_timeout_s=2.0)
    assert (status, trace) == (1, ["drain bus draining", "close bus stopped"])
    assert events == [
        "drain_requested",
        "drain_step_failed",
        "drain_cut_short",
        "close_step_failed",
        "close_step_failed",
        "service_stopped",
    ]


def test_what_comes_after_a_step_that_is_cut_short_has_its_turn() -> None:
    """Events are still sent where requests took all of the time; a second signal spares that, too."""
    trace: list[str] = []

    async def hang() -> None:
        await asyncio.Event().wait()

    async def main(lifecycle: Lifecycle) -> None:
        lifecycle.on_drain("requests", hang)
        steps(trace, lifecycle, "events")
        lifecycle.on_drain("hang", hang)
        steps(trace, lifecycle, "never")
        lifecycle.request_drain("test")
        await asyncio.sleep(0.1)

    status, events = live(main, drain_timeout_s=2.0)
    assert status == 1
    assert trace == ["drain events draining", "close never stopped", "close events stopped"]
    assert events == ["drain_requested", "drain_cut_short", "drain_cut_short", "service_stopped"]


def test_a_service_may_declare_that_it_cannot_go_on() -> None:
    """`fail` stops without draining, status 1."""
    trace: list[str] = []

    async def main(lifecycle: Lifecycle) -> None:
        steps(trace, lifecycle, "bus")
        lifecycle.fail("bus closed for good")

    assert live(main)[0] == 1
    assert trace == ["close bus stopped"]


PROGRAM = """
import asyncio, sys
from common.runtime.lifecycle import run_service
from common.runtime.logging import configure_logging

async def hang():
    print("draining", flush=True)
    await asyncio.Event().wait()

async def main(lifecycle):
    if sys.argv[1] == "hang":
        lifecycle.on_drain("hang", hang)
    async def close():
        print("closed", flush=True)
    lifecycle.on_close("main", close)
    print("ready", flush=True)

sys.exit(run_service(main, log=configure_logging("test"), drain_timeout_s=600.0))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_a_second_one_does_not_wait(number: signal.Signals) -> None:
    """One signal: drained, status 0. A second one during a drain that hangs: at once, closed, status 1."""
    for argument, answers, status in (("drain", ["closed"], 0), ("hang", ["draining", "closed"], 1)):
        command = [sys.executable, "-c", PROGRAM, argument]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},  # noqa: TID251 - passed on
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for answer in answers:
                process.send_signal(number)
                assert process.stdout.readline() == f"{answer}\n"
            _, logged = process.communicate(timeout=30)
        assert process.returncode == status
        assert all(line.startswith("{") for line in logged.splitlines())
