"""What an engine makes of the reports of a pull."""

import asyncio

from common.engine.transfer.pull_reports import Pulling
from contracts.handoff import Grant
from contracts.manifest import Role
from contracts.rank_pull import PullShards, PullStopped

GRANT = Grant(worker_id="p", incarnation="i", generation=1, block_ids=(0,), slot=0)
COMMAND = PullShards(
    seq=1, lock=1, source=GRANT, roles=(Role.CONV, Role.SSM), num_cached_tokens=0, parallel=True, timeout_ms=1000
)


def stopped(rank: int) -> PullStopped:
    """The end of the pull on one rank."""
    return PullStopped(rank=rank, seq=1, lock=1, started_ns=10, ended_ns=20 + rank)


def test_a_pull_is_over_when_every_rank_has_stopped_and_not_when_one_says_so_twice() -> None:
    """The result waits for the rank that is still at work."""

    async def scenario() -> None:
        pulling = Pulling(COMMAND, 2)
        seen = []
        for rank in (1, 1, 0):
            pulling.put(stopped(rank))
            seen.append((pulling.is_ended, pulling.silent_ranks()))
        assert seen == [(False, [0]), (False, [0]), (True, [])]
        assert (await pulling.ended).error is None

    asyncio.run(scenario())
