"""What can go wrong in a handoff, which promise holds then, and the tests that show it.

| event | promise | shown by |
| --- | --- | --- |
| commit against cancel | both are one compare-and-set; the loser obeys | test_every_order_with_a_rival_that_cancels, test_every_order_of_an_honest_handoff_with_cancel, test_a_record_of_another_request_wins |
| a cancel comes before what it cancels | a tombstone until the deadline | test_a_release_before_its_request_is_a_tombstone, test_a_reservation_that_comes_after_its_cancel_is_refused, test_a_cancelled_prompt_that_nobody_ran_is_dropped |
| a reservation of which no broker knows | the next broker goes on with it or takes it back | test_what_a_worker_holds_for_nobody_is_taken_back, test_what_was_not_committed_goes_on, test_memory_that_nobody_releases_comes_back_after_the_deadline |
| another broker takes over in mid-commit | the commit is told again; lower fences are refused; the ledger is asked together again | test_every_order_around_a_crash_behind_the_commit, test_the_second_takes_over_what_a_dead_leader_had_committed, test_a_committed_record_is_committed_again, test_parts_are_asked_for_until_prefill_has_told_its_end |
| decode dies between reserve and commit | no commit to a start that is gone; the peer is closed | test_a_worker_that_signs_off_fails_its_handoffs, test_a_restarted_worker_is_another_worker, test_a_dead_decode_worker_is_unlinked_when_its_lease_ends |
| a decode worker that stood still wakes up | it sees that its lease has lapsed and leaves; what it says late is ignored | test_a_lease_lapses_when_the_process_stood_still_past_its_end, test_a_worker_that_stood_still_writes_nothing_more, test_superseded_attempts_are_ignored |
| the same command comes twice | the answer of the first time; another command under its name is refused | test_the_same_submit_is_delivery_and_another_is_a_duplicate, test_a_reservation_for_something_else_is_refused, test_a_run_into_another_grant_is_refused, test_the_same_number_is_answered_from_the_record |
| a request is sent to another worker behind what was delivered | it goes on without a repeat or a gap, sampled or not | test_decode_goes_on_behind_the_delivered_tokens, test_a_later_attempt_goes_on_behind_the_delivered_tokens, test_a_token_does_not_depend_on_its_batch, test_an_attempt_may_begin_later |
| decode runs out of blocks | the youngest becomes another attempt | test_a_decode_worker_ends_what_gives_way_and_another_attempt_goes_on_behind_it, test_a_mixed_worker_computes_again_what_gave_way, test_a_preempted_attempt_has_not_failed |
| a router dies | its handoffs are cancelled, and nobody computes for it | test_the_end_of_a_router_cancels_what_it_asked_for, test_nothing_is_computed_for_a_router_that_is_gone, test_an_outage_and_another_start_of_a_router_stop_nothing |
| a rank process dies | its worker ends loudly | test_a_rank_that_dies_fails_the_engine_loudly, test_one_engine_that_dies_ends_the_worker |
| one rank cannot do what it is asked | one verdict for all ranks; the process goes on | test_one_rank_that_cannot_run_a_step_fails_it_on_all, test_a_sampling_failure_is_everybodys, test_a_step_that_fails_ends_its_requests_with_the_error_and_the_worker_goes_on |
| a transfer fails after its prompt was told to be computed | the handoff ends at once, not at its deadline | test_one_rank_that_cannot_push_ends_its_request_alone |
| there is no room | a bounded number of tries elsewhere, then 429 with a moment to come back | test_attempts_are_bounded, test_a_refused_prompt_is_tried_elsewhere, test_a_refused_request_is_tried_again_later_and_later, test_clients_that_were_refused_together_do_not_come_back_together |
| messages come twice, late, or in another order | nothing is set aside twice | test_every_handoff_ends_and_all_memory_comes_back, test_every_order_ends_well, test_messages_of_another_start_change_nothing |
| an answer is lost after its work was done | the question is repeated and answered from the record | test_each_kth_message_is_lost_and_every_request_finishes, test_a_lost_answer_is_asked_for_again, test_the_first_messages_of_a_kind_are_lost_and_every_request_finishes, test_each_kth_message_is_lost_and_every_client_is_served |
| the client leaves | all who were told of the request hear of it; all memory is back | test_leaving_in_any_phase_gives_all_memory_back, test_a_cancel_reaches_everybody_that_was_told, test_a_client_that_leaves_inside_a_stream_is_noticed, test_what_a_client_that_left_has_taken_comes_back |
| prefill dies while it computes or sends | decode's memory is kept from others, then back; another attempt | test_promises_are_kept_under_three_faults, test_a_death_in_mid_write_is_not_done, test_a_worker_that_falls_silent_is_lost |
| a broker dies | the next one has a higher fence, and what is under way finishes | test_every_handoff_goes_on_when_its_broker_dies, test_two_broker_processes_on_one_server, test_the_second_goes_on_with_what_a_dead_leader_had_not_committed |
| the bus is down for seconds | nothing that was acknowledged is lost | test_streams_survive_an_outage_of_nats, test_an_outage_of_the_bus_is_waited_out, test_tokens_of_an_outage_come_in_order_afterwards |
| a peer stands still and wakes up | its late writes meet a closed grant | test_a_rank_that_wakes_up_changes_nothing, test_a_frozen_writer_that_wakes_up_changes_nothing |
| what arrived is not what was sent | no answer from it, on any rank | test_one_wrong_block_on_one_rank_fails_its_request_alone, test_what_is_pulled_is_verified_as_well, test_any_byte_of_a_sequence_changes_its_cache_s_digest_and_no_other |
| a prompt fits nowhere | 413 before anything is set aside | test_bad_requests_are_refused_before_anything_is_allocated, test_a_prompt_of_300000_tokens_that_fits_nowhere_is_refused_at_once |
| the first token ends the request | nothing more is sent, and both sides are free | test_a_first_token_that_ends_the_request, test_max_tokens_one_ends_on_prefill, test_a_first_token_that_ends_the_request_pulls_nothing, test_an_end_of_sequence_as_first_token_ends_on_prefill, test_a_stop_string_in_the_first_token_ends_the_request |
| a shard of a pull fails | all shards end before anybody hears of it; no late write | test_a_shard_that_fails_fails_the_pull_once_all_are_over, test_a_shard_that_fails_ends_the_pull_and_gives_everything_back, test_a_release_drops_what_has_not_begun_and_waits_for_the_rest |
| a source takes its memory back while it is read | what was read does not count | test_what_is_read_after_the_source_took_its_memory_back_does_not_count, test_a_read_that_was_overtaken_does_not_count, test_an_unchecked_generation_is_seen |
| too much memory is kept from use | the worker leaves, to be started again | test_a_worker_with_too_much_in_quarantine_drains_and_leaves, test_quarantine_that_ends_or_is_small_moves_nobody |
"""

from tests.contract.known_tests import known_tests
from tests.contract.test_reported_faults import rows_of

NUM_EVENTS = 27


def test_every_event_has_tests_and_each_of_them_exists() -> None:
    """The table above is true: no event twice, none without a test that always runs, and no test in it that was renamed or removed."""
    rows, known = rows_of(__doc__ or ""), known_tests()
    assert len({event for event, _ in rows}) == len(rows) == NUM_EVENTS
    assert {name for _, names in rows for name in names} - known.keys() == set()
    assert [event for event, names in rows if not any(known[name] for name in names)] == []
