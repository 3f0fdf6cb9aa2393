"""What `shard-pull` makes of the events of pulls and pushes: restores, the latency that is looked for, tables and aims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from contracts.errors import PdmeshError
from contracts.events import EventName, HandoffEvent
from loadtest.client import Sample
from loadtest.phases import Handoff
from loadtest.report import Report, Table, number, percent
from loadtest.statistics import Spread, ratio, spread

WAIT_SHARE: Final = 0.44
"""The share of a restore that waiting for shards takes, one after the other, at the latency that is looked for."""
WAIT_SHARES: Final = (0.39, 0.49)
"""Shares for which the aim is judged: less waiting leaves less to win, and more is another case."""
WAIT_AIM: Final = 0.30
SERIAL: Final = "pull, serial"
PARALLEL: Final = "pull, parallel"
PUSH: Final = "push"
MODES: Final = (SERIAL, PARALLEL, PUSH)


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff, in ms: `restore` from the end of prefill's compute to decode's first step, `wait` for the shards of all roles.

    `merges` has what merging took for each role, `pull` is all of the pull by decode's clock, `parallel` how it went by its own word.
    A push has none of these.
    """

    restore: float
    wait: float | None = None
    merges: dict[str, float] = {}
    pull: float | None = None
    parallel: bool | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The restores of one mode over links of one latency. Spreads in ms; `parallel` is what the events say of all of them."""

    mode: str
    latency_ms: int
    parallel: bool | None
    ttft: Spread
    restore: Spread
    wait: Spread | None
    merges: dict[str, Spread]
    pull: Spread | None

    @property
    def wait_share(self) -> float | None:
        """How much of a restore its wait is, in the middle of both; None without a wait."""
        return None if self.wait is None else ratio(self.wait.p50, self.restore.p50)


def num_shards(prefill: str) -> int:
    """Source ranks of a prefill worker's SPEC."""
    found = [word.partition("=")[2] for word in prefill.split(",") if word.startswith("tp=")]
    return int(found[0]) if found else 1


def latency_for(serial: Figures, shards: int) -> int:
    """The latency of each link, in whole ms, at which waiting is `WAIT_SHARE` of a serial restore.

    A latency L adds `shards * L` to both: `(wait + shards * L) / (restore + shards * L) = WAIT_SHARE` is solved for it.
    """
    if serial.wait is None:
        raise PdmeshError("the events of a pull do not tell how long it waited")
    missing = WAIT_SHARE * serial.restore.p50 - serial.wait.p50
    return max(1, round(missing / (1 - WAIT_SHARE) / shards))


def restores_of(handoffs: Sequence[Handoff], events: Sequence[HandoffEvent], *, parallel: bool | None) -> list[Restore]:
    """The restores of `handoffs`. Raises `PdmeshError` for one that was pulled in another way than `parallel` says; None: pushed."""
    unlocked = {event.handoff_id: event for event in events if event.event is EventName.REQUEST_UNLOCKED}
    steps = {event.handoff_id: event.started_ns for event in events if event.event is EventName.TAKEN_OVER}
    computed: dict[str, int] = {}
    merges: dict[str, dict[str, float]] = {}
    for event in events:
        if event.event is EventName.LAYER_COMPUTED:
            computed[event.handoff_id] = max(computed.get(event.handoff_id, 0), event.at_ns)
        elif event.event is EventName.SHARDS_MERGED and event.role is not None and event.merge_ms is not None:
            merges.setdefault(event.handoff_id, {})[event.role] = event.merge_ms
    found: list[Restore] = []
    for each in handoffs:
        name = each.handoff_id
        began, ended = computed.get(name), steps.get(name)
        pull = unlocked.get(name)
        if (None if pull is None else pull.parallel) is not parallel:
            raise PdmeshError(f"{name} was moved in another way than it was set to")
        if began is None or ended is None:
            continue
        restore = (ended - began) / 1e6
        if pull is None:
            found.append(Restore(restore=restore))
        else:
            found.append(
                Restore(
                    restore=restore,
                    wait=pull.wait_ms,
                    merges=merges.get(name, {}),
                    pull=pull.total_ms,
                    parallel=pull.parallel,
                )
            )
    return found


def figures_of(mode: str, latency_ms: int, samples: Sequence[Sample], restores: Sequence[Restore]) -> Figures:
    """Sum up one mode; the restores are of one kind. Raises `PdmeshError` when nothing is known of it."""
    ttft = spread([sample.ttft_ms for sample in samples])
    restore = spread([each.restore for each in restores])
    if ttft is None:
        raise PdmeshError(f"{mode}: no request was answered")
    if restore is None:
        raise PdmeshError(f"{mode}: the events tell of no restore")
    roles = sorted({role for each in restores for role in each.merges})
    merges = {role: spread([each.merges[role] for each in restores if role in each.merges]) for role in roles}
    return Figures(
        mode=mode,
        latency_ms=latency_ms,
        parallel=restores[0].parallel,
        ttft=ttft,
        restore=restore,
        wait=spread([each.wait for each in restores if each.wait is not None]),
        merges={role: each for role, each in merges.items() if each is not None},
        pull=spread([each.pull for each in restores if each.pull is not None]),
    )


def figures_at(figures: Sequence[Figures], mode: str, latency_ms: int) -> Figures:
    """The figures of one mode over links of one latency."""
    return next(each for each in figures if (each.mode, each.latency_ms) == (mode, latency_ms))


def report_shard_pull(report: Report, figures: dict[str, tuple[Figures, ...]]) -> None:
    """A table for each topology, with parallel against serial, and the aim at the latency whose share of waiting is nearest to `WAIT_SHARE`."""
    for topology, all_of in figures.items():
        _report_table(report, topology, all_of)
        _report_aim(report, topology, all_of)
    report.put("shard_pull", figures)


def _report_table(report: Report, topology: str, all_of: Sequence[Figures]) -> None:
    roles = sorted({role for each in all_of for role in each.merges})
    header = (
        "links",
        "mode",
        "n",
        "TTFT ms",
        "restore p50",
        "p99",
        "pull wait p50",
        *(f"merge {role} p50" for role in roles),
        "pull p50",
        "restore",
        "wait",
    )
    rows: list[tuple[str, ...]] = []
    for each in all_of:
        serial = figures_at(all_of, SERIAL, each.latency_ms)
        rows.append(
            (
                f"{each.latency_ms} ms",
                each.mode,
                str(each.restore.count),
                number(each.ttft.p50),
                number(each.restore.p50),
                number(each.restore.p99),
                _middle(each.wait),
                *(_middle(each.merges.get(role)) for role in roles),
                _middle(each.pull),
                _change(each.restore, serial.restore),
                _change(each.wait, serial.wait),
            )
        )
    title = (
        f"{topology}: from the end of prefill's compute to decode's first step "
        "(the wait is for the shards of all roles; last columns: against serial)"
    )
    report.add(Table(title=title, header=header, rows=tuple(rows), num_names=2))


def _report_aim(report: Report, topology: str, all_of: Sequence[Figures]) -> None:
    """Judged where the links have a latency, and only if serial pulls wait there for about as much of a restore as the aim is made for."""
    shares = {
        each.latency_ms: each.wait_share
        for each in all_of
        if each.mode == SERIAL and each.latency_ms and each.wait_share is not None
    }
    if not shares:
        return
    latency_ms = min(shares, key=lambda each: abs(shares[each] - WAIT_SHARE))
    share = shares[latency_ms]
    serial, parallel = (figures_at(all_of, mode, latency_ms) for mode in (SERIAL, PARALLEL))
    fell = None
    if serial.wait is not None and parallel.wait is not None and serial.wait.p50:
        fell = 1 - parallel.wait.p50 / serial.wait.p50
    low, high = WAIT_SHARES
    shown = (
        f"{percent(fell)} at {latency_ms} ms (aim: at least {WAIT_AIM:.0%} where serial pull wait is {low:.0%} to {high:.0%} of the "
        f"restore; there it is {percent(share)}); restore {_change(parallel.restore, serial.restore)}"
    )
    met = fell >= WAIT_AIM if fell is not None and low <= share <= high else None
    report.aim(f"{topology}: reading side by side shortens the wait", shown, met=met)


def _middle(one: Spread | None) -> str:
    return number(None if one is None else one.p50)


def _change(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None or one is other:
        return "-"
    return f"{one.p50 / other.p50 - 1:+.1%}" if other.p50 else "-"
