"""Kinds of faults that users of serving meshes have met, and the tests that show what this one does instead.

Each line is a kind, not a case: where one thing can go wrong, its siblings are looked at too.

| fault | what must hold | shown by |
| --- | --- | --- |
| an answer is broken off, its memory is used again, and a writer that is still under way spoils another request | a late write is refused, or its memory belongs to nobody until it is over | test_no_late_write_lands_in_memory_that_is_used_again, test_a_late_write_is_seen_when_writers_are_not_waited_for, test_a_frozen_writer_that_wakes_up_changes_nothing, test_a_push_into_memory_that_was_taken_back_fails_and_changes_nothing, test_a_release_in_mid_read_keeps_the_memory_until_the_read_is_over, test_a_source_rank_that_freezes_in_mid_read_costs_decode_nothing_else |
| an acknowledgement of an end is lost, or that of one rank is taken for all | it is asked for again; memory is free when every rank has said so | test_the_first_messages_of_a_kind_are_lost_and_every_request_finishes, test_a_lost_answer_is_asked_for_again, test_memory_with_a_writer_at_work_is_quarantined_until_the_writer_stops, test_memory_that_is_still_being_read_is_not_given_back, test_what_one_rank_cannot_give_back_none_has_given_back, test_a_verdict_without_every_rank_is_seen |
| decode waits for a prefill worker that will never report | memory comes back within a bound, whoever is silent | test_a_worker_that_falls_silent_is_lost, test_memory_that_nobody_releases_comes_back_after_the_deadline, test_a_killed_writer_leaves_nothing, test_every_order_with_refusals_and_lost_workers, test_a_frozen_rank_that_is_killed_gives_the_memory_back |
| a transfer that could not even begin leaves the receiver counting for ever | one rank's failure ends the handoff at once, on both sides | test_one_rank_that_cannot_push_ends_its_request_alone, test_fail_names_parts_whose_transfers_fail, test_a_shard_that_fails_on_real_ranks_gives_everything_back |
| a stale reference to a cache brings another prompt's answer, with status 200 | grants that are used up, old or out of range are errors | test_grants_to_write_that_are_not_good_are_refused_by_the_ranks, test_grants_to_read_that_are_not_good_any_more_are_refused_by_the_ranks, test_a_grant_that_is_not_current_is_refused, test_what_is_read_after_the_source_took_its_memory_back_does_not_count |
| decode refuses what only it can judge, and prefill keeps its cache for minutes | the refusal comes before prefill begins, and frees what it holds | test_what_only_decode_can_refuse_costs_prefill_nothing, test_a_refused_reserve_releases_prefill_which_holds_the_prompt, test_a_refused_reserve_is_the_routers_to_know |
| states of convolutions are merged as one slab | queries, keys and values are cut apart | test_a_conv_state_taken_as_one_slab_is_noticed, test_conv_as_one_slab_is_seen, test_conv_channels_in_the_wrong_order_are_noticed |
| the head that a rank has a copy of is found by the remainder instead of by division | the right head, for every number of ranks and heads | test_a_head_found_by_modulo_is_noticed, test_replicated_heads_lie_on_neighbours, test_every_topology_reshards_exactly |
| more prefill ranks than heads: a part of the heads is sent and the cache called ready | what nobody wrote is seen, and is never called ready | test_every_topology_reshards_exactly, test_replicas_share_the_writing_as_evenly_as_heads_can_be_dealt, test_two_prompts_of_one_batch_arrive_each_with_its_own_bytes, test_a_chunk_that_is_missing_is_seen |
| the first request between two sizes that nobody had tried ends a worker | every size hands over to every other, from the first request on | test_the_first_request_of_a_fresh_mesh_is_served, test_every_pair_of_sizes_gives_the_reference_tokens, test_any_number_of_replicas_hands_over_to_any_other |
| what works request by request breaks with 128 at once | so many at once are served, between different sizes | test_128_requests_at_once_are_served, test_sixteen_streams_equal_their_single_runs_and_leave_nothing |
| a rank without a layer of a kind never says that it is done | done is what the plan says of each rank, be it nothing | test_a_source_that_owes_nothing_is_closed_from_the_start, test_a_rank_whose_parts_all_move_the_other_way_may_say_so, test_needs_every_planned_part_of_every_source |
| the count of done ranks leaves some out | no commit while the report of one rank is missing | test_no_commit_before_every_rank_has_reported, test_the_ranks_of_two_replicas_do_not_add_up, test_the_explorer_sees_a_ledger_that_counts_wrongly |
| one lost notice of completion hangs a request for ever | what is lost is asked for; each request ends by its deadline | test_each_kth_message_is_lost_and_every_request_finishes, test_the_first_messages_of_a_kind_are_lost_and_every_request_finishes, test_all_messages_of_a_kind_are_lost_and_every_request_ends, test_each_kth_message_is_lost_and_every_client_is_served, test_tokens_that_never_come_are_asked_for |
| what was sent of one chunk is forgotten with the next, on several ranks | every chunk counts, each token once | test_1700_tokens_in_chunks_of_256_arrive_whole, test_a_chunk_that_is_missing_is_seen, test_what_is_reported_of_all_chunks_tiles_what_the_ledger_waits_for |
| what was broken off is reported as an answer that ended by its length | an error, a status, and no reason for an end | test_a_request_that_is_cancelled_in_mid_transfer_ends_as_an_error, test_a_failure_behind_a_whole_answer_has_a_status, test_a_failure_inside_a_stream_is_an_explicit_error |
| an answer that gave way asks again for a transfer that there is only once | another attempt, with a prefill and a transfer of its own | test_a_decode_worker_ends_what_gives_way_and_another_attempt_goes_on_behind_it, test_who_gives_way_after_a_takeover_by_pull_is_not_pulled_again, test_real_ranks_of_a_decode_worker_grow_and_an_ended_answer_goes_on_in_another_attempt |
| answers give way to each other in turn while memory comes back late | nobody gives way while enough is coming back | test_nobody_gives_way_while_enough_is_coming_back, test_who_gave_way_into_quarantine_waits_for_its_end, test_memory_that_does_not_come_back_is_not_waited_for_for_ever |
| two requests are let in that outgrow the memory together | both end; the younger gives way | test_every_request_ends_and_the_pool_is_whole_again, test_who_is_let_in_leaves_a_block_for_each_that_may_grow, test_a_mixed_worker_computes_again_what_gave_way |
| a deadline of prefill measures how long decode's line is | a burst of eight times what decode holds is served | test_128_requests_at_once_are_served, test_a_reservation_waits_for_memory_and_gets_it_in_its_turn, test_a_line_longer_than_every_inner_timeout_is_waited_out, test_a_line_longer_than_decode_waits_is_waited_out_by_the_router, test_a_line_that_nobody_waits_out_is_refused_as_full_and_never_as_late |
| ranks disagree on what only one of them sees, and enter different collectives | one verdict for all ranks | test_one_rank_that_cannot_run_a_step_fails_it_on_all, test_a_bind_that_fails_on_one_rank_is_undone_on_the_others, test_diverging_ranks_fail_instead_of_mixing_bytes |
| one rank alone knows that its bytes are wrong | all ranks fail that request, and no other | test_one_wrong_block_on_one_rank_fails_its_request_alone, test_one_wrong_byte_on_one_rank_is_named, test_only_the_request_whose_cache_differs_is_refused, test_a_block_that_was_read_wrong_on_one_rank_fails_its_request_alone, test_a_state_that_went_bad_at_one_source_rank_fails_its_request_alone |
| a prefill worker that is started again breaks decode | another start is another worker; the rest goes on | test_promises_are_kept_under_three_faults, test_a_restarted_worker_is_another_worker, test_a_restarted_decode_worker_is_unlinked_and_linked_again, test_a_source_rank_that_is_killed_in_mid_read_costs_decode_nothing_else |
| prefill fails, and decode's memory is held for minutes | it is free at once | test_a_prefill_that_fails_frees_decode_at_once, test_a_prefill_that_fails_is_reported_and_keeps_its_memory_until_the_release |
| the client leaves between prefill and decode, and the cache stays | leaving in any phase gives everything back | test_leaving_in_any_phase_gives_all_memory_back, test_every_order_of_an_honest_handoff_with_cancel, test_a_cancel_reaches_everybody_that_was_told, test_what_a_client_that_left_has_taken_comes_back |
| one token is asked for and two come; the first is dropped, or the last doubled | very short answers have exactly their tokens | test_very_short_outputs_have_exactly_their_tokens, test_max_tokens_one_ends_on_prefill, test_a_first_token_that_ends_the_request, test_without_mixed_batches_prompts_and_decoding_take_turns, test_an_end_of_sequence_as_first_token_ends_on_prefill, test_an_end_of_sequence_as_second_token_ends_on_decode, test_a_stop_string_in_the_first_token_ends_the_request |
| all tokens of a prompt are said to have been cached | none of a cold prompt are | test_the_first_request_of_a_fresh_mesh_is_served, test_128_requests_at_once_are_served |
| a very long prompt looks like a timeout | it is served, or refused at once as too long | test_a_prompt_of_300000_tokens_that_fits_nowhere_is_refused_at_once, test_a_prompt_of_300000_tokens_that_fits_is_served, test_prompts_that_fit_nowhere_are_refused_for_good |
| counts of load drift with failures, until one worker gets everything | even again after failures, departures and restarts | test_load_is_even_after_failures_departures_and_a_restart, test_a_count_that_is_never_given_back_is_seen, test_loads_return_to_zero, test_pairs_are_loaded_evenly_after_failures_departures_and_a_restart, test_a_stream_counts_at_decode_alone, test_a_count_that_is_never_given_back_by_one_side_is_seen |
| a prefix of a prompt is found in the cache of its attention, and the states of its other layers, or the draft's, are not those behind it | there are no prefixes to find: the setting is refused at start | test_every_combination_starts_or_names_its_rules, test_a_refusal_says |
| a cache of prefixes that cannot be had with such layers fails in the middle of a request | it is refused at start, by name | test_every_combination_starts_or_names_its_rules, test_a_refusal_says |
| partial attention is merged with a logarithm of another base, or with nothing in it | the base counts; nothing merges to nothing | test_a_logarithm_of_another_base_is_seen, test_the_merge_of_any_partition_is_the_whole, test_ranks_that_share_blocks_attend_like_one_that_has_them_all, test_nobody_has_a_key |
| partial attention is right eagerly and wrong in a batch: rows that see nothing, or memory of somebody else, are not cleared | neither shows, in any row | test_rows_that_are_not_cleared_are_seen, test_foreign_memory_that_is_not_cleared_is_seen, test_keys_that_a_rank_does_not_see_change_the_tokens |
| the check of accuracy cannot fail | a planted wrong byte turns every check red | test_a_planted_fault_must_show, test_a_planted_fault_shows_in_the_tokens, test_one_wrong_byte_on_one_rank_is_named |
| rows of memory in between are numbered within a batch, so that two requests share one | each request owns its rows, from its first chunk to its takeover | test_one_staging_row_for_two_requests_is_seen, test_two_prompts_of_one_batch_are_pulled_each_with_its_own_bytes, test_who_finds_no_staging_row_waits_in_line |
| a second request's bytes arrive before the first has been taken over, in its place | the first is still whole | test_a_takeover_that_is_late_finds_its_bytes_although_others_have_been_pushed, test_a_second_request_in_the_first_ones_slot_is_seen |
| a second chunk begins at the first row again | chunks lie one behind the other | test_two_prompts_of_one_batch_arrive_each_with_its_own_bytes, test_a_second_chunk_that_restarts_at_row_0_is_seen |
| the message that lets decode begin is lost, and only a log knows | it is sent again; else an error by the deadline | test_all_messages_of_a_kind_are_lost_and_every_request_ends, test_the_deadline_ends_a_handoff_that_nobody_ends |
| one decode worker that does not answer ends the prefill worker | the others are served | test_a_black_hole_costs_only_what_fell_into_it, test_a_peer_that_accepts_and_hangs_holds_nobody_up, test_a_decode_worker_that_does_not_answer_holds_up_no_other, test_a_push_of_which_nobody_knows_the_end_costs_its_link_and_what_is_on_it |
"""

import re

from tests.contract.known_tests import found_in, known_tests

NUM_FAULTS = 39
MIN_TESTS = 2


def rows_of(text: str) -> list[tuple[str, list[str]]]:
    """The first cell of each row of a table, and the tests that its last cell names."""
    rows = re.findall(r"^\| ([^|]+) \|.*\| (test_[^|]*) \|$", text, re.MULTILINE)
    return [(first, last.split(", ")) for first, last in rows]


def test_every_kind_of_fault_has_tests_and_each_of_them_exists() -> None:
    """The table above is true: no kind twice, none without two tests that always run, and none of these was renamed or removed."""
    rows, known = rows_of(__doc__ or ""), known_tests()
    assert len({fault for fault, _ in rows}) == len(rows) == NUM_FAULTS
    assert {name for _, names in rows for name in names} - known.keys() == set()
    assert [fault for fault, names in rows if sum(known[name] for name in set(names)) < MIN_TESTS] == []


def test_a_name_that_does_not_exist_is_seen() -> None:
    """The check can fail."""
    ((fault, names),) = rows_of(
        "| a fault | what must hold | test_there_is_no_such, test_a_name_that_does_not_exist_is_seen |"
    )
    assert fault == "a fault"
    assert set(names) - known_tests().keys() == {"test_there_is_no_such"}


def test_a_test_that_does_not_always_run_is_seen() -> None:
    """Whether it is marked as long by itself or with its module; one of whose parameters some are long runs."""
    module = """
import pytest

@pytest.mark.long
def test_by_itself(): ...

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_in_part(number): ...

@pytest.mark.long
@pytest.fixture
def nothing_that_is_tested(): ...

def test_behind_it(): ...
"""
    assert dict(found_in(module)) == {"test_by_itself": False, "test_in_part": True, "test_behind_it": True}
    assert not any(runs for _, runs in found_in(f"{module}\npytestmark = [pytest.mark.long]\n"))
