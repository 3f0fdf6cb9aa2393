"""Every race of the handoff protocol, every row of what can go wrong, and every invariant, with the tests that hold it.

The table is checked: each test that it names is there. Whoever renames or removes one has to say here what takes its place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EXPLORED = "property/test_broker_core_explored.py"
MODEL = "property/broker_model.py"
STEPS = "unit/test_broker_handoff_steps.py"
ADOPTED = "unit/test_broker_adoption_steps.py"
PULLS = "unit/test_broker_pull_steps.py"
SHELL = "integration/test_broker_shell.py"
TERMS = "integration/test_broker_leadership.py"
ADOPTION = "integration/test_broker_adoption.py"
SURVEYS = "integration/test_broker_surveys.py"
WITH_WORKERS = "integration/test_broker_with_workers.py"
PREEMPTION = "integration/test_worker_preemption.py"
WORKER = "integration/test_worker_handoff.py"

RACES: dict[str, tuple[str, ...]] = {
    "commit against cancel": (
        f"{EXPLORED}::test_every_order_with_a_rival_that_cancels",
        f"{EXPLORED}::test_every_order_of_an_honest_handoff_with_cancel",
        f"{SHELL}::test_a_cancel_reaches_everybody_that_was_told",
        f"{WORKER}::test_a_cancel_stops_computing_and_keeps_memory_until_the_release",
    ),
    "cancel before run": (
        f"{WORKER}::test_a_release_before_its_request_is_a_tombstone",
        f"{STEPS}::test_a_release_stands_for_the_rest_of_the_deadline",
    ),
    "an acceptance that comes after the end": (f"{STEPS}::test_an_acceptance_after_the_end_is_answered_by_a_release",),
    "orphaned reserve": (
        f"{ADOPTION}::test_a_handoff_goes_on_whose_record_is_behind",
        f"{SURVEYS}::test_what_a_worker_holds_for_nobody_is_taken_back",
        f"{WORKER}::test_memory_that_nobody_releases_comes_back_after_the_deadline",
    ),
    "failover before the commit": (
        f"{EXPLORED}::test_every_order_around_a_crash_of_the_broker",
        f"{ADOPTION}::test_a_handoff_goes_on_while_prefill_computes",
        f"{WITH_WORKERS}::test_every_handoff_goes_on_when_its_broker_dies",
    ),
    "failover in a pull": (
        f"{EXPLORED}::test_every_order_around_a_crash_in_a_pull",
        f"{EXPLORED}::test_every_order_around_a_crash_under_the_lock",
        f"{ADOPTION}::test_a_pull_goes_on_under_its_lock",
    ),
    "failover in mid-commit": (
        f"{TERMS}::test_the_second_takes_over_what_a_dead_leader_had_committed",
        f"{ADOPTED}::test_a_committed_record_is_committed_again",
        f"{EXPLORED}::test_every_order_around_a_crash_behind_the_commit",
        f"{ADOPTED}::test_a_worker_that_is_through_with_it_is_listened_to",
    ),
    "failover between a report and its record": (
        f"{ADOPTION}::test_what_a_worker_was_thanked_for_outlives_the_broker",
    ),
    "a broker that stood still": (
        f"{EXPLORED}::test_every_order_with_a_broker_of_a_later_term",
        f"{STEPS}::test_a_broker_that_finds_the_record_of_a_later_term_makes_way",
        f"{WORKER}::test_commands_that_break_a_rule_are_refused_by_name",
    ),
    "decode dies between reserve and commit": (
        f"{SHELL}::test_a_worker_that_signs_off_fails_its_handoffs",
        f"{SHELL}::test_a_restarted_worker_is_another_worker",
        f"{EXPLORED}::test_every_order_with_refusals_and_lost_workers",
    ),
    "a frozen decode wakes": (
        "unit/test_broker_leases.py::test_a_worker_that_wakes_is_not_gone",
        f"{STEPS}::test_messages_of_another_start_change_nothing",
        "unit/test_router_token_order.py::test_superseded_attempts_are_ignored",
    ),
    "duplicate run": (
        "integration/test_worker_repeated.py::test_a_run_into_another_grant_is_refused",
        f"{SHELL}::test_a_lost_answer_is_asked_for_again",
    ),
    "re-dispatch": (
        f"{ADOPTION}::test_a_later_attempt_ends_the_one_before",
        f"{ADOPTION}::test_two_attempts_that_a_broker_finds_are_one_request",
        f"{STEPS}::test_delivered_tokens_are_told_to_both_and_count_in_the_end",
        "unit/test_worker_sent_tokens.py::test_a_later_attempt_goes_on_behind_the_delivered_tokens",
    ),
    "decode runs out of blocks": (
        f"{PREEMPTION}::test_a_decode_worker_ends_what_gives_way_and_another_attempt_goes_on_behind_it",
    ),
    "router dies": (
        f"{STEPS}::test_the_end_of_a_router_cancels_what_it_asked_for",
        f"{STEPS}::test_another_routers_end_is_nobodys_business",
        "integration/test_worker_presence.py::test_nothing_is_computed_for_a_router_that_is_gone",
    ),
    "a rank process dies": (
        "integration/test_engine_ranks.py::test_a_rank_that_dies_fails_the_engine_loudly",
        "integration/test_engine_ranks.py::test_one_rank_that_cannot_run_a_step_fails_it_on_all",
    ),
    "an old end of a pull": (
        f"{PULLS}::test_the_end_of_another_pull_says_nothing",
        f"{EXPLORED}::test_the_explorer_sees_an_old_end_of_a_pull_that_is_believed",
    ),
    "a part that moves both ways": (f"{PULLS}::test_a_part_that_moves_the_other_way_breaks_the_protocol",),
    "source released while it is read": (
        "integration/test_engine_pull.py::test_a_release_in_mid_read_keeps_the_memory_until_the_read_is_over",
        "contract/dataplane/test_dataplane_revocation.py::test_a_read_that_was_overtaken_does_not_count",
    ),
}

ROWS: dict[str, tuple[str, ...]] = {
    "reserve refused": (f"{SHELL}::test_a_refused_reserve_is_the_routers_to_know",),
    "delivered twice, late, or out of order": (
        f"{EXPLORED}::test_every_order_of_an_honest_handoff_with_cancel",
        f"{WITH_WORKERS}::test_every_handoff_ends_and_all_memory_comes_back",
    ),
    "reply lost after the work was done": (
        f"{SHELL}::test_a_lost_answer_is_asked_for_again",
        f"{SHELL}::test_no_commit_before_every_rank_has_reported",
        "integration/test_broker_pull.py::test_lost_reports_and_a_lost_end_are_asked_for",
    ),
    "client leaves": (
        f"{SHELL}::test_a_cancel_reaches_everybody_that_was_told",
        "e2e/test_disconnects.py::test_leaving_in_any_phase_gives_all_memory_back",
    ),
    "prefill dies while computing, sending or being read": (
        f"{SHELL}::test_a_worker_that_falls_silent_is_lost",
        f"{PULLS}::test_every_end_frees_the_lock",
        "integration/test_engine_pull.py::test_a_source_that_dies_makes_pulls_fail",
    ),
    "decode dies before commit": (f"{SHELL}::test_a_worker_that_signs_off_fails_its_handoffs",),
    "decode dies after commit": (f"{SHELL}::test_a_restarted_worker_is_another_worker",),
    "one rank of a worker fails": (
        f"{WORKER}::test_a_step_that_fails_ends_its_requests_with_the_error_and_the_worker_goes_on",
    ),
    "broker dies": (f"{WITH_WORKERS}::test_every_handoff_goes_on_when_its_broker_dies",),
    "NATS is down": (
        f"{SHELL}::test_an_outage_of_the_bus_is_waited_out",
        f"{EXPLORED}::test_every_order_with_outages_of_the_bucket",
        "e2e/test_nats_outage.py::test_streams_survive_an_outage_of_nats",
    ),
    "a peer freezes and wakes": (
        "e2e/test_frozen_rank.py::test_a_rank_that_wakes_up_changes_nothing",
        "contract/dataplane/test_dataplane_revocation.py::test_no_late_write_lands_in_memory_that_is_used_again",
    ),
    "digest differs": (
        "e2e/test_corrupt_caches.py::test_one_wrong_block_on_one_rank_fails_its_request_alone",
        f"{PULLS}::test_a_verified_handoff_needs_digests",
        f"{EXPLORED}::test_every_order_around_a_crash_with_digests",
    ),
    "a prompt that fits nowhere": (
        "unit/test_router_placement.py::test_prompts_that_fit_nowhere_are_refused_for_good",
    ),
    "first token ends the request": (
        f"{SHELL}::test_a_first_token_that_ends_the_request",
        f"{PULLS}::test_a_first_token_that_ends_the_request_pulls_nothing",
        f"{EXPLORED}::test_every_order_of_a_request_that_ends_with_its_first_token",
    ),
    "preemption after takeover": (f"{PREEMPTION}::test_a_preempted_sequence_that_is_cancelled_does_not_come_back",),
}

INVARIANTS: dict[str, tuple[str, ...]] = {
    "I1 a block has one owner": (
        "unit/test_worker_blocks.py::test_quarantined_memory_belongs_to_nobody_until_its_writers_stop",
    ),
    "I2 no write lands outside its grant": (
        "contract/dataplane/test_dataplane_revocation.py::test_revocation_refuses_later_writes",
    ),
    "I3 decode starts once, with a closed ledger": (
        f"{MODEL}::check_commit",
        "property/test_broker_ledger_tiles.py::test_closes_with_the_last_piece_and_not_before",
    ),
    "I4 token indices are contiguous from 0": (f"{WITH_WORKERS}::test_every_handoff_ends_and_all_memory_comes_back",),
    "I5 every request ends by its deadline": (
        f"{MODEL}::explore",
        f"{SHELL}::test_the_deadline_ends_a_handoff_that_nobody_ends",
        f"{STEPS}::test_the_deadline_does_not_wait_for_the_bucket",
    ),
    "I6 every pool is back": (f"{MODEL}::check", f"{WITH_WORKERS}::test_every_handoff_ends_and_all_memory_comes_back"),
    "I7 bounds": (
        "integration/test_broker_submits.py::test_too_many_handoffs_are_refused",
        f"{SHELL}::test_ended_handoffs_are_forgotten_in_time",
    ),
}


def named() -> Iterator[tuple[str, str]]:
    """Each entry of the tables with a test that it names."""
    for table in (RACES, ROWS, INVARIANTS):
        for entry, tests in table.items():
            yield from ((entry, test) for test in tests)


@cache
def functions_of(path: str) -> frozenset[str]:
    """The functions that a file defines."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(("entry", "test"), sorted(set(named())))
def test_what_holds_a_rule_is_there(entry: str, test: str) -> None:
    """No race, row or invariant loses its test unnoticed."""
    path, _, name = test.partition("::")
    assert name in functions_of(path), f"{entry}: {path} defines no {name}"


def test_every_entry_is_held_by_something() -> None:
    """An empty row would look like a rule that is kept."""
    assert all(tests for table in (RACES, ROWS, INVARIANTS) for tests in table.values())
