"""Transfers of the data plane's load test: what they move, how they are summed up, and that what arrives is looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.dataplane import OWN_METHODS, Family
from loadtest.dataplane_case import KIB, MIB, Case, Positions, pieces_of, read_bytes, shown_bytes
from loadtest.dataplane_ends import Method, TransferFailed
from loadtest.dataplane_figures import Block, CaseFigures, Turn, figures_of, report_dataplane
from loadtest.dataplane_process import DestinationProcess, SourceProcess
from loadtest.remote_process import Remote, RemoteFailed
from loadtest.report import Machine, Report

_REGION = 64 * KIB
_CASES = (Case(nbytes=64), Case(nbytes=16 * KIB), Case(nbytes=16 * KIB, piece_bytes=2 * KIB, shuffled=True))


class _Here:
    """A process of the measurement that is none: what lives there lives here."""

    def __init__(self, lives: DestinationProcess | SourceProcess) -> None:
        self._lives = lives
        self._answer: Any = None

    def tell(self, what: str, *arguments: Any) -> None:
        self._answer = getattr(self._lives, what)(*arguments)

    def hear(self) -> Any:
        return self._answer

    def ask(self, what: str, *arguments: Any) -> Any:
        self.tell(what, *arguments)
        return self._answer


@pytest.fixture
def ends(tmp_path: Any) -> Iterator[tuple[DestinationProcess, list[SourceProcess]]]:
    """A destination and two sources."""
    destination = DestinationProcess(OWN_METHODS, 2, _REGION, str(tmp_path))
    sources = [SourceProcess(OWN_METHODS, number, _REGION, str(tmp_path)) for number in range(2)]
    yield destination, sources
    for source in sources:
        source.close()
    destination.close()


def test_every_way_brings_the_bytes_of_every_source(ends: tuple[DestinationProcess, list[SourceProcess]]) -> None:
    """Small and large ones, in one piece and in many; and each transfer of a turn is timed."""
    destination, sources = ends
    family = Family(_Here(destination), [_Here(source) for source in sources])
    for method in OWN_METHODS:
        for case in _CASES:
            family.check(method, case)
            turn = family.turn(method, case, 3)
            assert [len(block.took_ns) for block in turn.blocks] == [3, 3]
            assert min(took for block in turn.blocks for took in block.took_ns) > 0


@pytest.mark.parametrize("method", [Method.SHM, Method.SOCKET, Method.TCP])
def test_bytes_that_do_not_arrive_are_noticed(
    method: Method, ends: tuple[DestinationProcess, list[SourceProcess]]
) -> None:
    """A source whose memory changes behind its back: what it sent is not what it says."""
    destination, sources = ends

    class Forgetful(_Here):
        def ask(self, what: str, *arguments: Any) -> Any:
            answer = super().ask(what, *arguments)
            if what == "check":
                destination.clear(0, method, arguments[2], 1)
            return answer

    family = Family(_Here(destination), [Forgetful(sources[0]), _Here(sources[1])])
    with pytest.raises(TransferFailed, match="other bytes arrived"):
        family.check(method, Case(nbytes=16 * KIB))


def test_pieces_are_packed_at_the_source_and_apart_at_the_destination() -> None:
    """Every byte of the source once, every second place at the destination, in any order."""
    for shuffled in (False, True):
        case = Case(nbytes=64, piece_bytes=16, shuffled=shuffled)
        runs = case.runs(128)
        assert list(pieces_of(runs, remote=False)) == [(128 + 16 * place, 16) for place in range(4)]
        there = list(pieces_of(runs, remote=True))
        assert sorted(there) == [(128 + 32 * place, 16) for place in range(4)]
        assert (there != sorted(there)) is shuffled
        assert case.span == 128


def test_positions_go_round_and_never_over_the_end() -> None:
    """What does not fit behind the last begins anew."""
    positions = Positions(100)
    assert [positions.take(span) for span in (40, 40, 40, 60, 100)] == [0, 40, 0, 40, 0]


@pytest.mark.parametrize(
    ("text", "nbytes", "shown"),
    [("64KiB", 64 * KIB, "64 KiB"), (" 16 mib", 16 * MIB, "16 MiB"), ("64", 64, "64 B"), ("1536B", 1536, "1536 B")],
)
def test_sizes_are_read_and_shown(text: str, nbytes: int, shown: str) -> None:
    """In the largest unit that fits."""
    assert (read_bytes(text), shown_bytes(nbytes)) == (nbytes, shown)


def _turn(*sources: tuple[int, ...], began_ns: int = 0) -> Turn:
    blocks = tuple(
        Block(began_ns=began_ns, ended_ns=began_ns + sum(took), took_ns=took, cpu_s=0.25) for took in sources
    )
    return Turn(blocks=blocks, destination_cpu_s=0.5)


def test_ratios_are_those_of_the_same_round() -> None:
    """A round in which the machine was slow is slow for all: the ratio does not see it."""
    case = Case(nbytes=1000)
    turns = {
        Method.MEMCPY: [_turn((100, 100)), _turn((1000, 1000)), _turn((100, 100))],
        Method.SHM: [_turn((200, 200)), _turn((2000, 2000)), _turn((200, 200))],
    }
    copied, shared = figures_of(case, turns)
    assert shared.over == {Method.MEMCPY: (0.5, 0.5, 0.5)}
    assert (copied.rate[0], shared.rate[0]) == (10.0, 5.0)
    assert shared.latency_us == 0.2
    assert shared.num_transfers == 6
    assert shared.cpu_s_per_gb == pytest.approx(3 * 0.75 / 6000e-9)


def test_several_sources_count_together() -> None:
    """Two that send at once: the bytes of both, over the time from the first beginning to the last end."""
    (found,) = figures_of(Case(nbytes=1000), {Method.SHM: [_turn((100, 100), (200, 200))]})
    assert found.rate[0] == 4000 / 400
    assert found.num_sources == 2


def _figures(method: Method, base: Method, share: float, nbytes: int = 16 * MIB) -> CaseFigures:
    return CaseFigures(
        method=method,
        shape="one piece",
        nbytes=nbytes,
        num_sources=1,
        num_transfers=1,
        rate=(1.0, 1.0, 1.0),
        latency_us=1.0,
        cpu_s_per_gb=1.0,
        over={base: (share, share, share)},
    )


def test_aims_are_said_apart_from_what_is_right() -> None:
    """A missed aim is counted in the last line, and is no failure; other sizes have no aim."""
    report = Report("dataplane", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))
    figures = [
        _figures(Method.SHM, Method.MEMCPY, 0.96),
        _figures(Method.TCP, Method.SOCKET, 0.5),
        _figures(Method.TCP, Method.SOCKET, 0.1, nbytes=MIB),
        _figures(Method.TCP, Method.SOCKET, 0.1, nbytes=64),
    ]
    report_dataplane(report, figures, {Method.MOONCAKE: "not installed"})
    told = json.loads(report.json())
    assert [each["met"] for each in told["aims"]] == [True, False]
    assert told["figures"]["absent"] == {"mooncake": "not installed"}
    assert report.status == 0
    assert report.text().splitlines()[-1] == "passed; aims: 1 met, 1 missed"
    report.fail("other bytes arrived")
    assert report.text().splitlines()[-1].startswith("1 failure; aims: 1 met")
    assert report.status == 1


class _Lives:
    """What lives in a process of the test's own: it can do something, refuse, and die."""

    def add(self, one: int, other: int) -> int:
        return one + other

    def refuse(self) -> None:
        raise TransferFailed("not today")

    def die(self) -> None:
        os._exit(3)

    def close(self) -> None:
        """Nothing is held."""


def test_a_process_that_fails_or_dies_is_told_of_by_name() -> None:
    """A refusal says why and the process goes on; a death is an end, whoever notices it."""
    with Remote("helper", _Lives) as remote:
        assert remote.ask("add", 2, 3) == 5
        with pytest.raises(RemoteFailed, match="helper: TransferFailed: not today"):
            remote.ask("refuse")
        assert remote.ask("add", 1, 1) == 2
        with pytest.raises(RemoteFailed, match="helper has died"):
            remote.ask("die")
        with pytest.raises(RemoteFailed, match="helper has died"):
            remote.ask("add", 1, 1)
