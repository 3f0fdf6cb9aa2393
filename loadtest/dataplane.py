"""`dataplane`: our data planes beside memcpy and a raw socket, between processes, in rounds that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from common.runtime.clock import Clock, Deadline
from contracts.errors import PdmeshError
from loadtest.dataplane_case import Case, shown_bytes
from loadtest.dataplane_ends import Method, TransferFailed
from loadtest.dataplane_figures import LATENCY_BYTES, CaseFigures, Turn, figures_of, report_dataplane
from loadtest.dataplane_mooncake import why_not
from loadtest.dataplane_process import DestinationProcess, SourceProcess, shared_folder
from loadtest.remote_process import Process, Remote
from loadtest.report import Report
from loadtest.rounds import orders
from loadtest.settings import DataPlaneSettings

OWN_METHODS: Final = (Method.MEMCPY, Method.SHM, Method.SOCKET, Method.TCP)
MAX_TRANSFERS: Final = 64
"""Most transfers of one block: more than these only make a round longer."""
MIN_TRANSFERS: Final = 2
NUM_LATENCIES: Final = 200
LATENCY_CASE: Final = Case(nbytes=64)
_IN_ONE_PIECE: Final = frozenset({Method.SOCKET, Method.MOONCAKE})
"""Ways that know no pieces."""


def run_dataplane(settings: DataPlaneSettings, report: Report, clock: Clock, say: Callable[[str], None]) -> None:
    """Measure, and fill the report. Blocks; raises PdmeshError when a transfer fails or the time is up."""
    deadline = Deadline.after(clock, settings.time_limit_s)
    absent = {} if (reason := why_not()) == "" else {Method.MOONCAKE: reason}
    # An engine of others has processes of its own: its threads must not cost the rest anything.
    families = (OWN_METHODS,) if absent else (OWN_METHODS, (Method.MOONCAKE,))
    figures: list[CaseFigures] = []
    for num_sources in settings.num_sources:
        with ExitStack() as stack:
            say(f"starting a destination and {num_sources} source(s), {settings.region_bytes >> 20} MiB each way")
            folder = shared_folder(stack)
            bench: dict[Method, Family] = {}
            for methods in families:
                family = Family.start(stack, methods, num_sources, settings.region_bytes, folder)
                bench |= dict.fromkeys(methods, family)
            for case in _cases(settings, num_sources):
                say(f"{shown_bytes(case.nbytes)}, {case.shape}")
                for method, family in bench.items():
                    family.check(method, case)
                turns: dict[Method, list[Turn]] = {method: [] for method in bench}
                count = _count(case, settings.block_bytes)
                for order in orders(tuple(bench), settings.num_rounds):
                    for method in map(Method, order):
                        turns[method].append(bench[method].turn(method, case, count))
                    if deadline.passed:
                        raise PdmeshError(f"not done after {settings.time_limit_s:g} s (--time-limit)")
                figures += figures_of(case, turns)
    report_dataplane(report, figures, absent)


class Family:
    """A destination's process and those of its sources, linked by some methods."""

    def __init__(self, destination: Process, sources: Sequence[Process]) -> None:
        """Link them. Raises PdmeshError when that fails."""
        self._destination = destination
        self._sources = tuple(sources)
        for number, source in enumerate(sources):
            source.ask("connect", destination.ask("addresses", number))

    @classmethod
    def start(
        cls, stack: ExitStack, methods: Sequence[Method], num_sources: int, region_bytes: int, folder: str
    ) -> Family:
        """Start the processes, which end with `stack`. Raises PdmeshError when one cannot start."""
        made = (methods, num_sources, region_bytes, folder)
        destination = stack.enter_context(Remote("destination", DestinationProcess, *made))
        sources = [
            stack.enter_context(Remote(f"source {number}", SourceProcess, methods, number, region_bytes, folder))
            for number in range(num_sources)
        ]
        return cls(destination, sources)

    def check(self, method: Method, case: Case) -> None:
        """One transfer of each source, not measured. Raises `TransferFailed` unless its bytes are the ones that were sent."""
        for number, source in enumerate(self._sources):
            position = source.ask("place", method, case)
            if method is Method.MEMCPY:
                source.ask("check", method, case, position)
                continue
            self._destination.ask("clear", number, method, position, case.span)
            sent = source.ask("check", method, case, position)
            arrived = Case(nbytes=case.nbytes) if method in _IN_ONE_PIECE else case
            if self._destination.ask("checksum", number, method, arrived, position) != sent:
                raise TransferFailed(
                    f"{method}: other bytes arrived than were sent ({case.nbytes} bytes, {case.shape})"
                )

    def turn(self, method: Method, case: Case, count: int) -> Turn:
        """`count` transfers of each source, all sources at once."""
        before_s = self._destination.ask("usage")
        for source in self._sources:
            source.tell("block", method, case, count)
        blocks = tuple(source.hear() for source in self._sources)
        return Turn(blocks=blocks, destination_cpu_s=self._destination.ask("usage") - before_s)


def _cases(settings: DataPlaneSettings, num_sources: int) -> Iterator[Case]:
    yield LATENCY_CASE
    for nbytes in settings.sizes:
        yield Case(nbytes=nbytes)
    if num_sources == 1:
        for piece_bytes in settings.pieces:
            for shuffled in (False, True):
                yield Case(nbytes=settings.piece_case_bytes, piece_bytes=piece_bytes, shuffled=shuffled)


def _count(case: Case, block_bytes: int) -> int:
    if case.nbytes <= LATENCY_BYTES:
        return NUM_LATENCIES
    return min(MAX_TRANSFERS, max(MIN_TRANSFERS, block_bytes // case.nbytes))
