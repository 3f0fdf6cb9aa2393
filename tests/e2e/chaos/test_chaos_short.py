"""Faults of each kind, one after the other, on a mesh of real processes under 16 streams: every promise is kept."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.faults import Action, Fault, Happened, draw
from tests.e2e.chaos.report import judge, make_report
from tests.e2e.chaos.run import ChaosSettings, run_chaos
from tests.e2e.chaos.streams import Ending, Outcome

PAIR = (("prefill", "tp=2"), ("decode", "tp=1"))
SCRIPT = (
    Fault(action=Action.KILL, target="decode-0", phase="sending"),
    Fault(action=Action.KILL, target="prefill-0/rank-1", phase="computing"),
    Fault(action=Action.STOP, target="nats", phase="decoding"),
)


async def test_promises_are_kept_under_three_faults() -> None:
    """No token is lost, repeated or foreign, every stream ends, and nothing is left; what died serves again."""
    settings = ChaosSettings(
        seed=5, script=SCRIPT, pause_s=(0.5, 0.5), workers=PAIR, num_brokers=1, num_sampled=2, transport="tcp"
    )
    report = await run_chaos(settings, print)
    print(report.text)
    assert report.violations == ()


@pytest.mark.long
@pytest.mark.parametrize(("transport", "seed"), [("shm", 1), ("tcp", 2)])
async def test_promises_are_kept_under_many_faults(transport: str, seed: int) -> None:
    """Two minutes of faults by chance on each transport, long freezes and two brokers among them."""
    report = await run_chaos(ChaosSettings(seed=seed, duration_s=120.0, transport=transport), print)
    print(report.text)
    assert report.violations == ()


def _outcome(ending: Ending, *token_ids: int, code: str = "worker_lost", at: float = 10.0) -> Outcome:
    case = Case(name="c", prompt=(1,), parameters={}, expected=(1, 2, 3))
    return Outcome(case=case, started_at=at, ended_at=at + 1, ending=ending, code=code, token_ids=list(token_ids))


@pytest.mark.parametrize(
    ("outcome", "strict", "broken"),
    [
        (_outcome(Ending.WHOLE, 1, 2, 3), True, ""),
        (_outcome(Ending.WHOLE, 1, 2), False, "came, of"),
        (_outcome(Ending.WHOLE, 1, 2, 2, 3), False, "came, of"),
        (_outcome(Ending.ERROR, 1, 2), False, ""),
        (_outcome(Ending.ERROR, 1, 2), True, "did not go on"),
        (_outcome(Ending.ERROR, 2), False, "came, of"),
        (_outcome(Ending.ERROR, code="None"), False, "does not say"),
        (_outcome(Ending.ERROR), True, ""),
        (_outcome(Ending.LATE, 1), False, "did not end in time"),
        (_outcome(Ending.CUT, 1), False, "without a word"),
        (_outcome(Ending.CUT, 1, at=100.0), False, ""),
        (_outcome(Ending.CUT, 1, at=130.0), False, "without a word"),
        (_outcome(Ending.CUT, code="ClientConnectorError", at=130.0), False, ""),
        (_outcome(Ending.CUT, code="ClientConnectorError", at=195.0), False, "without a word"),
    ],
)
def test_each_broken_promise_is_named(outcome: Outcome, strict: bool, broken: str) -> None:
    """What came too little, twice or wrong, what did not end, and what ended without a word; a dead router excuses the last."""
    killed = Happened(fault=Fault(action=Action.KILL, target="router"), began_at=100.5, ended_at=100.5)
    found = judge([outcome], [killed], strict=strict)
    assert [broken in each for each in found] == ([True] if broken else [])
    report = make_report([outcome], [killed], strict=strict, restarts=Counter(), more=("left behind",))
    assert len(report.violations) == len(found) + 1


def test_every_process_and_phase_is_hit_by_chance() -> None:
    """A long run leaves nobody out."""
    rng = random.Random(1)
    faults = [draw(rng, ("prefill-0", "decode-0"), 2) for _ in range(2000)]
    targets = {fault.target for fault in faults}
    ranks = {f"{worker}/rank-{number}" for worker in ("prefill-0", "decode-0") for number in (0, 1)}
    assert targets == {"prefill-0", "decode-0", "broker", "broker-1", "nats", "router"} | ranks
    assert {fault.action for fault in faults} == set(Action)
    assert len({fault.phase for fault in faults}) == 8
