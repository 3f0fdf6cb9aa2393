"""Whether processes grow: the line through what was seen, and what the kernel says of a process."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading

import msgspec
import pytest

from loadtest.growth import MIB, Growth, fit, growth_of
from loadtest.memory import report_memory
from loadtest.processes import Usage, name_processes, usage
from loadtest.report import Machine, Report

_STEADY = Usage(own_bytes=100 * MIB, resident_bytes=200 * MIB, num_fds=10, num_threads=3)


def _growth(name: str, **last: int) -> Growth:
    return growth_of(name, [0, 1000, 2000], [_STEADY, _STEADY, msgspec.structs.replace(_STEADY, **last)])


def test_a_line_has_the_level_of_the_middle_and_the_growth_over_all_requests() -> None:
    """Whatever lies off it on both sides does not count."""
    line = fit([0, 10, 20, 30], [100.0, 110.0, 120.0, 130.0])
    assert (line.level, line.growth) == (115.0, 30.0)
    assert line.share == pytest.approx(30 / 115)
    assert fit([0, 10, 20], [5.0, 9.0, 5.0]).growth == 0.0


def test_a_line_needs_two_moments() -> None:
    """One look says nothing of growth."""
    with pytest.raises(ValueError, match="two different"):
        fit([5, 5], [1.0, 2.0])


@pytest.mark.parametrize(
    "last",
    [
        {"own_bytes": 102 * MIB},
        {"resident_bytes": 204 * MIB},
        {"num_fds": 12},
        {"num_threads": 5},
    ],
)
def test_growth_of_any_kind_counts(last: dict[str, int]) -> None:
    """Memory of its own, resident memory, descriptors, threads; less than an aim is steady, and so is what shrinks."""
    assert not _growth("p", **last).is_steady
    assert _growth("p", own_bytes=100 * MIB + MIB // 2).is_steady
    assert _growth("p", own_bytes=50 * MIB, num_fds=1).is_steady


def test_each_process_has_an_aim_but_the_bus() -> None:
    """The bus keeps messages on purpose."""
    report = Report("memory", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))
    processes = [_growth("broker"), _growth("nats", own_bytes=300 * MIB), _growth("router", num_fds=20)]
    report_memory(report, {"shm": processes}, 2000)
    aims = json.loads(report.json())["aims"]
    assert [(each["aim"], each["met"]) for each in aims] == [
        ("shm, broker does not grow", True),
        ("shm, router does not grow", False),
    ]


def test_what_a_process_holds_is_seen() -> None:
    """Memory that it writes, descriptors that it opens, threads that it starts."""
    before = usage(os.getpid())
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    held = mmap.mmap(-1, 8 * MIB)  # fresh pages: an allocator may have old ones left
    held.write(bytes([1]) * len(held))
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        after = usage(os.getpid())
    finally:
        os.close(fd)
        done.set()
        thread.join()
    with held:
        assert after.own_bytes - before.own_bytes > len(held) // 2
    assert after.resident_bytes >= after.own_bytes
    assert (after.num_fds, after.num_threads) == (before.num_fds + 1, before.num_threads + 1)


def test_processes_are_named_by_the_settings_that_the_launcher_gave_them() -> None:
    """Children of the root with a settings file are services; others are nobody's."""
    wait = "import sys; sys.stdin.read()"
    commands = (("--config", "/somewhere/decode-7.json"), ("--other", "x"))
    children = [subprocess.Popen([sys.executable, "-c", wait, *words], stdin=subprocess.PIPE) for words in commands]
    try:
        named = name_processes(os.getpid())
        assert named[os.getpid()] == "launcher"
        assert named[children[0].pid] == "decode-7"
        assert children[1].pid not in named
    finally:
        for child in children:
            child.communicate(timeout=30)
