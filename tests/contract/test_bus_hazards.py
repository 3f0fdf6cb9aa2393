"""What a NATS client can suffer, and the test that shows that our adapter does not.

| hazard | what goes wrong | shown by |
| --- | --- | --- |
| 1 | a CancelledError in a callback ends its subscription; callbacks run one by one | test_a_reader_that_is_cancelled_does_not_end_its_subscription, test_handlers_hold_up_neither_each_other_nor_their_subscription, test_whoever_waits_for_the_server_can_be_cancelled |
| 2 | watchers and ordered consumers are silent for ever after a restart or a freeze | test_a_watch_survives_a_restart_of_the_server, test_a_watch_goes_on_after_restart_upon_restart, test_a_watch_goes_on_after_the_server_stood_still, test_a_watch_goes_on_after_a_freeze_that_cost_the_connection, test_a_watch_whose_consumer_is_lost_begins_again, test_a_storm_of_reconnects_leaves_no_consumers_behind |
| 3 | messages of an outage are lost unnoticed, or come late | test_no_message_of_an_outage_arrives_late_or_is_lost_unnoticed, test_what_a_lost_connection_had_not_sent_yet_is_dropped_and_counted, test_calls_fail_at_once_while_the_server_is_down_and_work_again_after |
| 4 | a request during an outage waits out its timeout; flush says that all is well | test_calls_fail_at_once_while_the_server_is_down_and_work_again_after, test_a_request_in_flight_fails_when_the_server_dies, test_a_server_that_stands_still_counts_as_lost_and_comes_back |
| 5 | the client gives up after 60 tries, connects for ever to nobody, and is closed without a word | test_the_connection_outlives_more_tries_than_the_library_would_make, test_connecting_to_nobody_fails_in_time, test_a_connection_that_ends_for_good_is_told, test_a_service_whose_connection_is_closed_for_good_ends_with_an_error, test_every_service_ends_when_its_connection_is_closed_for_good |
| 6 | a subscription is announced before the server knows of it | test_whoever_has_subscribed_is_reachable_for_everybody |
| 7 | the caller's headers are written into | test_the_headers_of_the_caller_are_not_touched |
| 8 | payload and headers together over the limit: the connection is closed for good | test_payload_and_headers_together_are_capped, test_the_size_counts_headers_as_they_travel |
| 9 | a blocked loop is cut off as a slow consumer | test_a_blocked_loop_is_cut_off_by_the_server_seen_and_counted, test_a_slow_reader_costs_only_itself_and_is_counted |
| 10 | pull fetches stall after one that timed out | test_no_part_of_the_product_pulls, test_reading_a_stream_fails_when_the_server_stands_still_and_works_after |
| 11 | a ttl of a message is dropped by the first update; no watch tells of expiry | test_a_renewed_value_still_expires_and_no_watch_tells_of_it, test_values_expire, test_a_lease_is_kept_over_many_ttls_and_passes_on_when_its_holder_is_gone, test_a_frozen_server_ends_the_term_before_anybody_can_begin_another |
| 12 | revisions come twice after the loss of a store | test_the_revisions_of_a_wiped_bucket_start_again_under_another_epoch, test_a_wiped_store_ends_the_term_and_the_next_one_has_a_larger_fence, test_there_is_never_more_than_one_holder |
| 13 | a write without an answer: done, not done, or done later; an event stored twice | test_a_write_that_a_frozen_server_takes_later_is_done_once, test_a_write_that_died_with_the_server_can_be_made_again, test_a_write_in_flight_when_the_server_dies_may_have_been_done, test_records_over_a_server_that_stands_still_in_mid_write, test_events_survive_kill_upon_kill_each_stored_once, test_what_was_stored_and_not_acknowledged_is_not_stored_again |
| 14 | buckets in memory vanish with the server | test_buckets_and_streams_lie_in_files_and_those_in_memory_are_refused |
| 15 | a dead peer is found by timeout only | test_a_request_to_nobody_fails_fast, test_a_killed_peer_is_told_by_the_lack_of_responders |
| 16 | a stream keeps requests, and its acknowledgement races the reply | test_a_stream_that_would_keep_requests_is_refused, test_a_strange_stream_that_keeps_requests_stops_a_service_from_starting |
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PULLS = {"jetstream", "key_value", "pull_subscribe", "pull_subscribe_bind", "fetch", "next_msg", "ordered_consumer"}


def names_of_bus_tests() -> set[str]:
    """Names of all tests of the bus."""
    files = [*(ROOT / "tests" / "contract").glob("test_bus*.py"), *(ROOT / "tests" / "unit").glob("test_bus*.py")]
    return {
        name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }


def test_every_hazard_has_tests_and_each_of_them_exists() -> None:
    """The table above is true: sixteen hazards, and no test in it that was renamed or removed."""
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", __doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 17))
    named = {name for _, names in rows for name in names.split(", ")}
    assert named - names_of_bus_tests() == set()


def pulls(source: str) -> Iterator[str]:
    """Names in a module that read from a stream by the library's own means."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PULLS:
            yield node.attr


def test_no_part_of_the_product_pulls() -> None:
    """Hazard 10: streams and buckets are read by readers of our own, never by the library's fetches and watchers."""
    assert list(pulls("await client.jetstream().pull_subscribe('x')")) == ["pull_subscribe", "jetstream"]
    users = [
        file
        for folder in ("common", "services", "loadtest")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(r"^(import|from) nats\b", file.read_text(), re.MULTILINE)
    ]
    assert users
    found = {str(file.relative_to(ROOT)): list(pulls(file.read_text())) for file in users}
    assert {file: names for file, names in found.items() if names} == {}
