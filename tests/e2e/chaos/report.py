"""What a run under fire came to: every broken promise by name, and figures for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from tests.e2e.chaos.faults import Happened
from tests.e2e.chaos.outages import Allowance, time_lost
from tests.e2e.chaos.streams import Ending, Outcome

REFUSED: Final = "ClientConnectorError"
"""How a stream fails at whose address nobody listens."""
_NOTICED_S: Final = 10.0
_STARTED_S: Final = 90.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`violations` are empty for a good run."""

    violations: tuple[str, ...]
    text: str


def judge(
    outcomes: Sequence[Outcome], faults: Sequence[Happened], *, strict: bool, allowance: Allowance | None = None
) -> list[str]:
    """Name every stream that broke a promise.

    What comes is the beginning of what must come, and all of it unless there is an error; every stream ends in time; a connection
    breaks only if something was done to the router, and is refused only until somebody has had an answer again. `strict`: a stream that has begun goes on, whatever dies but the router,
    unless its time was up and `allowance` excuses that.
    """
    allowance = allowance or Allowance()
    found = []
    routers = [(each, _answers_again(outcomes, each)) for each in faults if each.fault.is_router]
    for outcome in outcomes:
        name = f"{outcome.case.name} ({outcome.ending}, {outcome.code or 'no code'}, {len(outcome.token_ids)} tokens)"
        refused = outcome.code == REFUSED and not outcome.token_ids
        excused = any(
            each.began_at <= outcome.ended_at
            and outcome.started_at <= (again_at if refused else each.ended_at + _NOTICED_S)
            for each, again_at in routers
        )
        if not outcome.is_right:
            found.append(f"{name}: {outcome.token_ids} came, of {list(outcome.case.expected)}")
        if outcome.ending is Ending.LATE:
            found.append(f"{name}: it did not end in time")
        if outcome.ending is Ending.CUT and not excused:
            found.append(f"{name}: it ended without a word")
        if outcome.ending is Ending.ERROR and outcome.code in {"", "None", "internal_error"}:
            found.append(f"{name}: its error does not say what happened")
        begun = outcome.ending is Ending.ERROR and outcome.token_ids
        if strict and begun and not excused and not allowance.excuses(outcome):
            lost = time_lost(allowance.outages, outcome.started_at, outcome.ended_at)
            took = outcome.ended_at - outcome.started_at
            found.append(f"{name}: it had begun, and did not go on: {took:.1f} s, {lost:.1f} s of them in an outage")
    return found


def _answers_again(outcomes: Sequence[Outcome], fault: Happened) -> float:
    """When the first stream began that had an answer of the router after a fault, at least a moment and at most a while after it."""
    begun = (
        o.started_at for o in outcomes if o.ending in {Ending.WHOLE, Ending.ERROR} and o.started_at >= fault.ended_at
    )
    latest = fault.ended_at + _STARTED_S
    return max(fault.ended_at + _NOTICED_S, min(latest, min(begun, default=latest)))


def recoveries(outcomes: Sequence[Outcome], faults: Sequence[Happened]) -> dict[str, list[float]]:
    """Seconds from each fault's beginning to the end of the first whole stream that began after it, by what was done to what."""
    found: dict[str, list[float]] = {}
    for each in faults:
        ends = [o.ended_at for o in outcomes if o.ending is Ending.WHOLE and o.started_at >= each.began_at]
        if ends:
            found.setdefault(_kind(each), []).append(min(ends) - each.began_at)
    return found


_ENDINGS: Final = {
    Ending.CUT: "cut (the connection broke off without a word)",
    Ending.LATE: "late (it did not end in its time)",
}


def make_report(
    outcomes: Sequence[Outcome],
    faults: Sequence[Happened],
    *,
    strict: bool,
    restarts: Counter[str],
    more: Sequence[str],
    allowance: Allowance | None = None,
) -> Report:
    """Judge and tell. `more` are broken promises that no stream shows."""
    allowance = allowance or Allowance()
    violations = (*judge(outcomes, faults, strict=strict, allowance=allowance), *more)
    errors = Counter(
        f"{_ENDINGS.get(o.ending, o.ending)}: {o.code or 'no code'}" for o in outcomes if o.ending is not Ending.WHOLE
    )
    begun = sum(1 for o in outcomes if o.ending is not Ending.WHOLE and o.token_ids)
    whole = sum(o.ending is Ending.WHOLE for o in outcomes)
    num_tokens = sum(len(o.token_ids) for o in outcomes)
    lines = [
        f"requests: {len(outcomes)}, whole {whole}, {num_tokens} tokens; interrupted after their first token: {begun}"
    ]
    lines += [f"  {what}: {count}" for what, count in sorted(errors.items())]
    lines.append(f"faults: {len(faults)}; restarts: " + (_counts(restarts) or "none"))
    if strict:
        excused = [o for o in outcomes if o.token_ids and allowance.excuses(o)]
        longest = max(allowance.needed_s.values(), default=0.0)
        lines.append(
            f"out of time after their first token, and excused, as outages had left them less than they need in calm "
            f"({longest:.1f} s at most): {len(excused)}"
        )
    times = recoveries(outcomes, faults)
    for kind, count in sorted(Counter(_kind(each) for each in faults).items()):
        known = times.get(kind, [])
        back = (
            f"served again after {median(known):.1f} s (longest {max(known):.1f} s)" if known else "not seen to recover"
        )
        lines.append(f"  {kind}: {count}; {back}")
    lines.append(f"broken promises: {len(violations)}")
    lines += [f"  {violation}" for violation in violations[:20]]
    return Report(violations=violations, text="\n".join(lines))


def _kind(each: Happened) -> str:
    return f"{each.fault.action} {each.fault.target.partition('-')[0]}" + (
        " rank" if "/rank-" in each.fault.target else ""
    )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))
