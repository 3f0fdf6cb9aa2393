"""Who falls silent, and who is blamed for it."""

from common.bus.kept_record import PUT_EVERY_S
from common.bus.nats_connection import MAX_UNANSWERED_PINGS, PING_EVERY_S
from common.bus.storage import WORKER_TTL_S


def test_a_server_that_stands_still_is_noticed_before_its_silence_is_taken_for_the_death_of_workers() -> None:
    """A worker was heard up to one interval before the server froze: the connection is given up while it still counts as alive."""
    assert PUT_EVERY_S + PING_EVERY_S * (MAX_UNANSWERED_PINGS + 1) < WORKER_TTL_S
