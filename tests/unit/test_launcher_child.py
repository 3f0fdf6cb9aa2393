"""Children: tied to the launcher, watched, and gone for certain afterwards. Stand-in programs take the services' place."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.runtime.clock import SystemClock
from common.runtime.lifecycle import EXIT_SETTINGS
from services.launcher import tether
from services.launcher.child import Child, ChildSpec, tail
from services.launcher.core.restarts import RestartBudget
from services.launcher.supervisor import ChildDied, Supervisor

_SLEEPER = "import signal; print('up', flush=True); signal.pause()"
_POLITE = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
_DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
_PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid, flush=True); p.wait()"
_WAIT_S = 20.0


def _spec(tmp_path: Path, name: str, *program: str, stage: int = 0, drain_s: float = 10.0) -> ChildSpec:
    command = (sys.executable, "-c", *program)
    return ChildSpec(
        name=name, command=command, environ={}, log=tmp_path / f"{name}.log", stage=stage, drain_s=drain_s, role=name
    )


async def _said(log: Path) -> str:
    """What a child printed, once it has printed something."""
    async with asyncio.timeout(_WAIT_S):
        while not (text := "\n".join(tail(log))):  # noqa: ASYNC110 - a file cannot be waited for
            await asyncio.sleep(0.01)
    return text


def _runs(pid: int) -> bool:
    """Whether a process runs: it is neither away, nor waits to be reaped by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _gone(pid: int) -> None:
    """Returns once a process that is not our child has ended."""
    async with asyncio.timeout(_WAIT_S):
        while _runs(pid):  # noqa: ASYNC110 - only a parent can wait for a process
            await asyncio.sleep(0.01)


async def test_a_polite_child_ends_with_status_zero(tmp_path: Path) -> None:
    """SIGTERM is enough for it, and stopping twice is fine."""
    child = await Child.start(_spec(tmp_path, "polite", _POLITE))
    await _said(child.spec.log)
    assert await child.stop()
    assert await child.stop()
    assert child.status == 0


async def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    """One that does not drain in its time is killed, and that is not clean."""
    child = await Child.start(_spec(tmp_path, "deaf", _DEAF, drain_s=0.05))
    await _said(child.spec.log)
    assert not await child.stop()
    assert child.status == -signal.SIGKILL


async def test_grandchildren_go_too(tmp_path: Path) -> None:
    """What a child started belongs to its group, and is killed with it."""
    child = await Child.start(_spec(tmp_path, "parent", _PARENT, _DEAF))
    grandchild = int((await _said(child.spec.log)).split()[0])
    assert _runs(grandchild)
    await child.stop(drain=False)
    await _gone(grandchild)


async def test_a_child_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    """SIGKILL leaves the launcher no chance to clean up: the kernel ends its children."""
    program = f"""
import asyncio, signal, sys
from pathlib import Path
from services.launcher.child import Child, ChildSpec
async def main():
    command = (sys.executable, "-c", {_SLEEPER!r})
    log = Path({str(tmp_path / "orphan.log")!r})
    child = await Child.start(ChildSpec(name="orphan", command=command, environ={{}}, log=log, stage=0, drain_s=1.0))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    async with asyncio.timeout(_WAIT_S):
        pid = int(await launcher.stdout.readline())
        await _said(tmp_path / "orphan.log")
        assert _runs(pid)
        launcher.kill()
        await launcher.wait()
    await _gone(pid)


def test_a_tether_without_its_parent_starts_nothing() -> None:
    """A launcher that died before the kernel was asked is noticed: the command is not run."""
    command = [sys.executable, "-I", "-S", tether.__file__, "1", "/bin/echo", "started"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")


async def test_a_death_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    """The first thing to know about a service that died is what it said last."""
    deaths: asyncio.Queue[ChildDied] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, deaths.put_nowait, clock=SystemClock(), say=print)
        await supervisor.start(_spec(tmp_path, "sleeper", _SLEEPER))
        await supervisor.start(_spec(tmp_path, "broken", "import sys; print('no such model'); sys.exit(3)"))
        async with asyncio.timeout(_WAIT_S):
            death = await deaths.get()
        await supervisor.stop(lambda _text: None)
    assert (death.name, death.status) == ("broken", 3)
    assert "broken ended with status 3" in str(death)
    assert "| no such model" in str(death)
    assert deaths.empty()


async def test_stages_stop_in_order(tmp_path: Path) -> None:
    """The router goes before the workers and the bus last, whatever the order of their start."""
    order = tmp_path / "order"
    recording = f"""
import signal, sys
def leave(*_):
    with open({str(order)!r}, 'a') as file: file.write(sys.argv[1])
    sys.exit(0)
signal.signal(15, leave); print('up', flush=True); signal.pause()
"""
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda death: pytest.fail(str(death)), clock=SystemClock(), say=print)
        for stage in (2, 0, 1):
            await supervisor.start(_spec(tmp_path, f"s{stage}", recording, str(stage), stage=stage))
        for child in supervisor.children:
            await _said(child.spec.log)
        assert await supervisor.stop(lambda _text: None)
    assert order.read_text(encoding="utf-8") == "012"


async def test_a_second_signal_waits_for_nobody(tmp_path: Path) -> None:
    """After `hurry` nobody is given time to drain."""
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda death: pytest.fail(str(death)), clock=SystemClock(), say=print)
        child = await supervisor.start(_spec(tmp_path, "deaf", _DEAF, drain_s=3600.0))
        await _said(child.spec.log)
        stop = group.create_task(supervisor.stop(lambda _text: None), name="stop")
        await asyncio.sleep(0)
        supervisor.hurry()
        async with asyncio.timeout(_WAIT_S):
            assert not await stop
    assert child.status == -signal.SIGKILL


async def test_a_child_that_does_not_drain_is_named(tmp_path: Path) -> None:
    """People are told which one, and how it ended."""
    said: list[str] = []
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda death: pytest.fail(str(death)), clock=SystemClock(), say=print)
        child = await supervisor.start(_spec(tmp_path, "deaf", _DEAF, drain_s=0.05))
        await _said(child.spec.log)
        assert not await supervisor.stop(said.append)
    assert said == ["deaf did not drain: was killed by signal 9"]


@pytest.mark.parametrize("ready", [False, True])
async def test_the_end_by_sigterm_fails_only_once_the_children_serve(tmp_path: Path, ready: bool) -> None:
    """A child that is told to go before it has a handler for the signal has nothing to drain; later it should have drained."""
    said: list[str] = []
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda death: pytest.fail(str(death)), clock=SystemClock(), say=print)
        child = await supervisor.start(_spec(tmp_path, "sleeper", _SLEEPER))
        await _said(child.spec.log)
        if ready:
            supervisor.mark_ready()
        assert await supervisor.stop(said.append) is not ready
    assert child.status == -signal.SIGTERM
    assert said == (["sleeper did not drain: was killed by signal 15"] if ready else [])


async def test_without_a_broker_nobody_drains_for_long(tmp_path: Path) -> None:
    """What the others wait for can come no more: an hour to drain is cut to seconds once the broker has died."""
    died = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, lambda _death: died.set(), clock=SystemClock(), say=print)
        child = await supervisor.start(_spec(tmp_path, "deaf", _DEAF, drain_s=3600.0))
        await _said(child.spec.log)
        await supervisor.start(_spec(tmp_path, "broker", "import sys; sys.exit(1)"))
        async with asyncio.timeout(_WAIT_S):
            await died.wait()
            assert not await supervisor.stop(lambda _text: None)
    assert child.status == -signal.SIGKILL


_COUNTING = """
import pathlib, signal, sys
def leave(*_): sys.exit(0)
signal.signal(15, leave)
with open(sys.argv[1], 'a') as file: file.write('x')
print('up', flush=True)
while True: signal.pause()
"""


async def _starts(count: Path, wanted: int) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not count.exists() or len(count.read_text()) < wanted:  # noqa: ASYNC110, ASYNC240 - a file cannot be waited for
            await asyncio.sleep(0.01)


async def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    """People are told twice, what must be done before is done, and the new one drains as any other."""
    said: list[str] = []
    count, prepared = tmp_path / "count", tmp_path / "prepared"
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(
            group, lambda death: pytest.fail(str(death)), clock=SystemClock(), say=said.append, restarts_per_minute=1
        )
        spec = msgspec.structs.replace(
            _spec(tmp_path, "counting", _COUNTING, str(count)), before_restart=prepared.touch
        )
        child = await supervisor.start(spec)
        supervisor.mark_ready()
        await _starts(count, 1)
        child.kill()
        await _starts(count, 2)
        (again,) = supervisor.children
        assert again.pid != child.pid
        assert await supervisor.stop(said.append)
    assert said == ["counting was killed by signal 9; starting it again in 0.2 s", "counting runs again"]
    assert prepared.exists()


async def test_the_mesh_ends_once_a_child_has_used_up_its_restarts(tmp_path: Path) -> None:
    """The reason is that of the last death."""
    deaths: asyncio.Queue[ChildDied] = asyncio.Queue()
    broken = "import sys; sys.stdin.read(); print('no such model'); sys.exit(3)"
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, deaths.put_nowait, clock=SystemClock(), say=print, restarts_per_minute=2)
        supervisor.mark_ready()
        await supervisor.start(_spec(tmp_path, "broken", broken))
        async with asyncio.timeout(_WAIT_S):
            death = await deaths.get()
        await supervisor.stop(lambda _text: None)
    assert death.status == 3
    assert tail(tmp_path / "broken.log") == ["no such model"] * 3


async def test_a_death_is_told_from_its_own_life_alone(tmp_path: Path) -> None:
    """A log goes on over restarts: the reason of an earlier life is not given for a later one, nor shown with it."""
    deaths: asyncio.Queue[ChildDied] = asyncio.Queue()
    said: list[str] = []
    count = tmp_path / "count"
    program = """
import json, pathlib, sys
with open(sys.argv[1], 'a') as file: file.write('x')
life = len(pathlib.Path(sys.argv[1]).read_text())
print(json.dumps({'event': 'service_ended', 'reason': f'reason {life}'}))
sys.exit(3)
"""
    spec = _spec(tmp_path, "mortal", program, str(count))
    spec.log.write_text('{"event": "service_ended", "reason": "of an earlier mesh"}\n', encoding="utf-8")
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, deaths.put_nowait, clock=SystemClock(), say=said.append, restarts_per_minute=2)
        supervisor.mark_ready()
        await supervisor.start(spec)
        async with asyncio.timeout(_WAIT_S):
            death = await deaths.get()
        await supervisor.stop(lambda _text: None)
    assert [line.partition("; ")[0] for line in said if "again in" in line] == [
        f"mortal ended with status 3 (reason {life})" for life in (1, 2)
    ]
    assert death.cause == "reason 3"
    assert str(death).count("service_ended") == 1


async def test_wrong_settings_are_not_tried_again(tmp_path: Path) -> None:
    """They would be as wrong the next time."""
    deaths: asyncio.Queue[ChildDied] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(group, deaths.put_nowait, clock=SystemClock(), say=print, restarts_per_minute=5)
        supervisor.mark_ready()
        await supervisor.start(_spec(tmp_path, "wrong", f"import sys; sys.exit({EXIT_SETTINGS})"))
        async with asyncio.timeout(_WAIT_S):
            assert (await deaths.get()).status == EXIT_SETTINGS
        await supervisor.stop(lambda _text: None)


async def test_a_child_that_waits_for_its_restart_delays_no_stop(tmp_path: Path) -> None:
    """A mesh that is stopped meanwhile starts nothing more, and has nothing against that child."""
    said: asyncio.Queue[str] = asyncio.Queue()
    count = tmp_path / "count"
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(
            group,
            lambda death: pytest.fail(str(death)),
            clock=SystemClock(),
            say=said.put_nowait,
            restarts_per_minute=5,
        )
        child = await supervisor.start(_spec(tmp_path, "counting", _COUNTING, str(count)))
        supervisor.mark_ready()
        await _starts(count, 1)
        child.kill()
        async with asyncio.timeout(_WAIT_S):
            assert "starting it again" in await said.get()
        assert await supervisor.stop(said.put_nowait)
    assert count.read_text(encoding="ascii") == "x"
    assert said.empty()


def test_pauses_grow_until_a_minutes_restarts_are_used_up() -> None:
    """A minute after the first one there is room again."""
    budget = RestartBudget(6)
    assert [budget.pause_s(float(second)) for second in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, None]
    assert budget.pause_s(60.0) == 5.0
    assert RestartBudget(0).pause_s(0.0) is None


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """A missing log has none, and broken text does not hide the rest."""
    log = tmp_path / "a.log"
    assert tail(log) == ()
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert tail(log, 2) == ["two", "� three"]
