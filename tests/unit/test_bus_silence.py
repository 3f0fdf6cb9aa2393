"""Who falls silent, and who is blamed for it."""

import pytest

from common.bus.kept_record import PUT_EVERY_S
from common.bus.lease_term import OVERDUE_SHARE, RENEW_SHARE, STEP_DOWN_SHARE
from common.bus.nats_connection import MAX_UNANSWERED_PINGS, PING_EVERY_S
from common.bus.port import bucket_ttl_s
from common.bus.storage import LEASE_TTL_S, WORKER_TTL_S


def test_a_server_that_stands_still_is_noticed_before_its_silence_is_taken_for_the_death_of_workers() -> None:
    """A worker was heard up to one interval before the server froze: the connection is given up while it still counts as alive."""
    assert PUT_EVERY_S + PING_EVERY_S * (MAX_UNANSWERED_PINGS + 1) < WORKER_TTL_S


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_leader_notices_a_late_renewal_before_a_worker_counts_as_gone(replicas: int) -> None:
    """A server that stops between two puts and just after a renewal: the next renewal is overdue before the worker's time is up."""
    overdue_s = OVERDUE_SHARE * bucket_ttl_s(LEASE_TTL_S, replicas)
    assert PUT_EVERY_S + overdue_s < bucket_ttl_s(WORKER_TTL_S, replicas)
    assert RENEW_SHARE < OVERDUE_SHARE < STEP_DOWN_SHARE
