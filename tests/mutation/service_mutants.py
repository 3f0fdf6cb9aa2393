"""Mistakes in what services, workers and the bus decide."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import Mutant

_BROKER: Final = ("tests/unit/test_broker_handoff_steps.py", "tests/property/test_broker_core_explored.py")
_LEDGER: Final = ("tests/unit/test_broker_ledger.py", "tests/property/test_broker_ledger_tiles.py")
_WORKER: Final = ("tests/integration/test_worker_handoff.py",)
_PULL: Final = ("tests/integration/test_worker_pull.py",)
_SWITCHES: Final = ("tests/unit/test_worker_compatibility.py",)
_GUESSES: Final = ("tests/unit/test_worker_guesses.py",)
_GUESSING: Final = ("tests/integration/test_worker_guessing.py",)
_GRANTS: Final = ("tests/unit/test_worker_grant_checks.py",)
_ORDER: Final = ("tests/unit/test_router_token_order.py", "tests/property/test_router_token_order_shuffles.py")

MUTANTS: Final = (
    Mutant(
        name="skip the fence check",
        file="common/worker/core/table.py",
        before="return fence == self._highest_fence",
        after="return True",
        tests=_WORKER,
    ),
    Mutant(
        name="believe a fence that no lease shows",
        file="common/worker/fences.py",
        before="if held is not None and held >= fence:",
        after="if held is not None:",
        tests=("tests/integration/test_worker_fences.py",),
    ),
    Mutant(
        name="ask workers before the bucket holds the term",
        file="services/broker/core/adoption.py",
        before="    if messages.for_bucket(record) == event.record:  # it is of this very term\n        resume(turn)",
        after="    resume(turn)",
        tests=("tests/unit/test_broker_adoption_steps.py",),
    ),
    Mutant(
        name="call unknown what another broker has begun",
        file="services/broker/service.py",
        before="if is_unsure or (kept is not None and kept[0].fence > self._policy.fence):",
        after="if is_unsure:",
        tests=("tests/integration/test_broker_deposed.py",),
    ),
    Mutant(
        name="take another prompt for the one that is computed",
        file="services/prefill/service.py",
        before="if prefill is None or not same_work(prefill.command, command):",
        after="if prefill is None:",
        tests=("tests/integration/test_worker_repeated.py",),
    ),
    Mutant(
        name="take the old epoch for the new one",
        file="common/bus/lease_term.py",
        before="return epoch // _NANOSECONDS << REVISION_BITS | revision",
        after="return revision",
        tests=("tests/unit/test_bus_lease.py", "tests/contract/test_bus_lease.py"),
    ),
    Mutant(
        name="count parts instead of comparing ranges",
        file="services/broker/core/ledger.py",
        before="if ranges == owed[name] or _grown(name, ranges, owed[name], known.get(name, ())) == owed[name]:",
        after="if len(ranges) == len(owed[name]):",
        tests=_LEDGER,
    ),
    Mutant(
        name="commit before the ledger closes",
        file="services/broker/core/handoff.py",
        before="            and self.ledger_closed\n",
        after="",
        tests=_BROKER,
    ),
    Mutant(
        name="commit although the compare-and-set was lost",
        file="services/broker/core/writes.py",
        before="    if found is not None and found.state.terminal:",
        after="    if False:",
        tests=_BROKER,
    ),
    Mutant(
        name="release twice",
        file="services/broker/core/turn.py",
        before=" or role in handoff.settled or role in handoff.release_asked:",
        after=":",
        tests=_BROKER,
    ),
    Mutant(
        name="give returned memory back a second time",
        file="common/worker/core/blocks.py",
        before="        if held is not None:\n            self._return(held)",
        after="        self._return(reservation)",
        tests=("tests/unit/test_worker_blocks.py",),
    ),
    Mutant(
        name="free on cancel while granted",
        file="common/worker/service.py",
        before="                    self.replicas.of(sequence).scheduler.hold(sequence)\n                elif",
        after="                    await self.end(cancel.handoff_id)\n                elif",
        tests=_WORKER,
    ),
    Mutant(
        name="forget tombstones",
        file="common/worker/core/table.py",
        before="return handoff_id in self._tombstones",
        after="return False",
        tests=_WORKER,
    ),
    Mutant(
        name="give two owners one generation",
        file="common/worker/core/blocks.py",
        before="self._generation += self._dp",
        after="pass",
        tests=("tests/unit/test_worker_blocks.py",),
    ),
    Mutant(
        name="hand quarantined memory out",
        file="common/worker/core/blocks.py",
        before="            self._quarantined[held.generation] = held",
        after="            self._return(held)",
        tests=("tests/unit/test_worker_blocks.py",),
    ),
    Mutant(
        name="write without looking at the generation",
        file="common/dataplane/cell_check.py",
        before="            if header[start:end] != wanted:",
        after="            if False:",
        tests=("tests/unit/test_dataplane_cells.py", "tests/contract/dataplane/test_dataplane_revocation.py"),
    ),
    Mutant(
        name="take tokens of a superseded attempt",
        file="services/router/core/token_order.py",
        before="if frame.attempt != self._attempt:\n            return ()",
        after="if False:\n            return ()",
        tests=_ORDER,
    ),
    Mutant(
        name="wait for tokens of a worker that is lost",
        file="services/router/core/token_order.py",
        before=" or (frame.error is not None and self.end is None)",
        after="",
        tests=_ORDER,
    ),
    Mutant(
        name="forget who did not hear its release",
        file="services/broker/performer.py",
        before="            self._on_unheard(worker)",
        after="            pass",
        tests=("tests/integration/test_broker_surveys.py",),
    ),
    Mutant(
        name="yield to what a frozen broker took on",
        file="services/broker/core/writes.py",
        before="            adoption.take_over(turn, found, revision)",
        after="            _yield_to(turn, found)",
        tests=("tests/unit/test_broker_core_writes.py",),
    ),
    Mutant(
        name="drop a prompt that is asked to run meanwhile",
        file="common/worker/unclaimed_prompts.py",
        before=" or not self._prompts.is_still(unclaimed) or self._table.get(handoff_id) is not None:",
        after=":",
        tests=("tests/integration/test_worker_unclaimed_prompts.py",),
    ),
    Mutant(
        name="repeat tokens that were delivered",
        file="services/router/core/token_order.py",
        before="self._tokens.extend(token_ids[len(known) :])",
        after="self._tokens.extend(token_ids)",
        tests=_ORDER,
    ),
    Mutant(
        name="take over what was not pulled",
        file="services/decode/service.py",
        before="if pull is not None and not pull.is_done:",
        after="if False:",
        tests=_PULL,
    ),
    Mutant(
        name="count what a failed pull had read for the next one",
        file="services/decode/core/pulled_parts.py",
        before="        self._parts.clear()\n",
        after="",
        tests=("tests/unit/test_decode_pulled_parts.py",),
    ),
    Mutant(
        name="read from whoever the grant names",
        file="services/decode/core/source_check.py",
        before="    if source != reserved_for:",
        after="    if False:",
        tests=_GRANTS,
    ),
    Mutant(
        name="count what one rank holds of a sequence that several share",
        file="common/worker/core/blocks.py",
        before="self.block_tokens = block_size * dcp",
        after="self.block_tokens = block_size",
        tests=("tests/unit/test_worker_blocks.py",),
    ),
    Mutant(
        name="mix prompts and decoding with dcp",
        file="common/worker/core/effective.py",
        before="settings.mix_batch and settings.dcp == 1",
        after="settings.mix_batch",
        tests=_SWITCHES,
    ),
    Mutant(
        name="let prompts in pieces start with dcp unasked",
        file="common/worker/core/compatibility.py",
        before="    if is_prefill_chunked(settings, role) and not settings.experimental_dcp_chunked_prefill:",
        after="    if False:",
        tests=_SWITCHES,
    ),
    Mutant(
        name="let with dcp start what was never shown to work",
        file="common/worker/core/dcp_validated.py",
        before="        return value == default",
        after="        return True",
        tests=_SWITCHES,
    ),
    Mutant(
        name="cut a prompt that must be whole",
        file="common/worker/core/scheduler.py",
        before="return left if left <= budget else 0",
        after="return min(left, budget)",
        tests=("tests/unit/test_worker_whole_prompts.py",),
    ),
    Mutant(
        name="compute for a router that is gone",
        file="common/worker/deserted.py",
        before="            if sequence.router_id == router_id and ",
        after="            if False and ",
        tests=("tests/integration/test_worker_presence.py",),
    ),
    Mutant(
        name="take all guesses behind a draft that was handed over for right",
        file="common/worker/core/scheduler.py",
        before="if not item.token_ids or item.bootstrap:",
        after="if not item.token_ids:",
        tests=_GUESSES,
    ),
    Mutant(
        name="guess beyond a sequence's blocks",
        file="common/worker/core/scheduler.py",
        before="self._num_places(sequence) - 1, budget",
        after="budget",
        tests=_GUESSES,
    ),
    Mutant(
        name="send what was guessed behind the end",
        file="common/worker/generation.py",
        before="token_ids=produced.token_ids[:count], finish_reason",
        after="token_ids=produced.token_ids, finish_reason",
        tests=_GUESSING,
    ),
    Mutant(
        name="guess with a draft head whose cache has stayed behind",
        file="services/decode/service.py",
        before="command.drafts or not by_head",
        after="True",
        tests=_GUESSING,
    ),
    Mutant(
        name="let a switch start that is not built",
        file="common/worker/core/compatibility.py",
        before="        if getattr(case.settings, key) != only:",
        after="        if False:",
        tests=_SWITCHES,
    ),
    Mutant(
        name="owe a draft's pair before the first",
        file="services/prefill/core/owed_ranges.py",
        before="            first = max(start, part.namespace.first_token)",
        after="            first = start",
        tests=("tests/unit/test_prefill_owed_ranges.py",),
    ),
    Mutant(
        name="commit without a word of drafts",
        file="services/broker/core/messages.py",
        before="        drafts=handoff.record.drafts,\n",
        after="",
        tests=("tests/unit/test_broker_core_drafts.py",),
    ),
    Mutant(
        name="begin the indices of a later attempt anew",
        file="common/worker/core/sent_tokens.py",
        before="        self._first = num_delivered_tokens\n",
        after="        self._first = 0\n",
        tests=("tests/unit/test_worker_sent_tokens.py",),
    ),
    Mutant(
        name="let the deadline pass",
        file="services/broker/core/step.py",
        before="            progress.expire(turn)",
        after="            pass",
        tests=_BROKER,
    ),
)
