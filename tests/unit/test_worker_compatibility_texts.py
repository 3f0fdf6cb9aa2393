"""What each refusal of a combination of switches says, word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.engine.fake.model import FakeModel
from common.worker.core.compatibility import Caution, Refusal, Rule, judge
from common.worker.core.effective import Resolved
from common.worker.settings import PulledRoles, WorkerSettings
from contracts.dataplane import Transport
from contracts.pull import Transfer
from contracts.workers import WorkerRole

P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


def settings(**values: Any) -> WorkerSettings:
    """A worker whose model has two KV heads and four of each other kind."""
    return WorkerSettings(worker_id="w", model=Path("m"), **values)


@pytest.mark.parametrize(
    ("role", "values", "rule", "key", "value", "text", "remedy"),
    [
        (P, {"tp": 3}, Rule.TP, "tp", "3", "a divisor of num_key_heads = 4", "set tp to 1 or 2 or 4"),
        (
            D,
            {"tp": 2, "dcp": 2},
            Rule.DCP_CUT,
            "dcp",
            "2",
            "a divisor of 1, the ranks that replicate a KV head",
            "set dcp to 1, or tp to 4",
        ),
        (
            D,
            {"tp": 4, "dcp": 4},
            Rule.DCP_CUT,
            "dcp",
            "4",
            "a divisor of 2, the ranks that replicate a KV head",
            "set dcp to 1 or 2",
        ),
        (
            P,
            {"tp": 4, "dcp": 2},
            Rule.DCP_ROLE,
            "dcp",
            "2",
            "must be 1 on a prefill worker: its ranks keep whole KV heads, and push to any dcp",
            "set it for decode or mixed workers alone: decode.dcp, mixed.dcp",
        ),
        (
            M,
            {"tp": 4, "dcp": 2},
            Rule.DCP_CHUNKED,
            "dcp",
            "2",
            "must be 1 where prompts are computed in pieces: with dcp=2 that is experimental",
            (
                "set chunked_prefill=0 (prompts up to max_step_tokens), or experimental_dcp_chunked_prefill=1 "
                "(answers may differ in bits from those of dcp=1)"
            ),
        ),
        (
            D,
            {"dcp_interleave": 8},
            Rule.INTERLEAVE,
            "dcp_interleave",
            "8",
            "0, or block_size = 16: whole blocks alternate between ranks",
            "leave it out, or change block_size",
        ),
        (
            P,
            {"layerwise_kv_sharding": True},
            Rule.LAYERWISE,
            "layerwise_kv_sharding",
            "1",
            "0: each rank keeps its heads, or its blocks, of all layers",
            "leave it out; dcp cuts the KV cache by blocks",
        ),
        (P, {"device": "npu"}, Rule.DEVICE, "device", "npu", "one of cpu", "leave it out"),
        (
            D,
            {"max_step_tokens": 31},
            Rule.STEP,
            "max_step_tokens",
            "31",
            "at least num_slots = 32: every decoding sequence has a token in every step",
            "raise it, or lower num_slots",
        ),
        (
            P,
            {"max_step_tokens": 1_677_530},
            Rule.STEP_MESSAGE,
            "max_step_tokens",
            "1677530",
            "at most 1677529 with num_slots = 32: a rank is told of a step in one message",
            "lower it, or num_slots",
        ),
        (
            M,
            {"chunked_prefill": False, "reserve_output_tokens": 8},
            Rule.WHOLE_PROMPTS,
            "reserve_output_tokens",
            "8",
            "0 without chunked_prefill: one that gave way is computed again with its answer, which may not fit into a step",
            "leave it out, or set chunked_prefill=1",
        ),
        (
            D,
            {"pull": PulledRoles.ALL},
            Rule.PULL_ONLY,
            "pull",
            "all",
            "only with transfer=pull; this worker has transfer=push",
            "leave it out, or set transfer=pull",
        ),
        (
            D,
            {"transfer": Transfer.PULL, "num_staging_rows": 33},
            Rule.STAGING_ROWS,
            "num_staging_rows",
            "33",
            "at most num_slots = 32: a request that is pulled has a slot",
            "lower it, or raise num_slots",
        ),
        (
            P,
            {"transport_advertise_host": "node-1"},
            Rule.TCP_ONLY,
            "transport_advertise_host",
            "node-1",
            "only with transport=tcp; this worker has transport=shm",
            "leave it out, or set transport=tcp",
        ),
        (
            P,
            {"transport": Transport.TCP, "transport_host": ""},
            Rule.TCP_ADDRESS,
            "transport_host",
            "",
            "a name or an address of this host; 0.0.0.0 for all of them",
            "give one, or leave it out",
        ),
        (
            P,
            {"transport": Transport.TCP, "transport_host": "::"},
            Rule.TCP_ADDRESS,
            "transport_advertise_host",
            "",
            "what peers can reach, when transport_host is ::",
            "give a name or an address of this host",
        ),
        (
            D,
            {"num_speculative_tokens": 8, "max_step_tokens": 8, "num_slots": 8},
            Rule.GUESSES_FIT,
            "num_speculative_tokens",
            "8",
            "below max_step_tokens = 8: a token and its guesses are verified in one step",
            "lower it, or raise max_step_tokens",
        ),
        (
            M,
            {"drafter": "ngram"},
            Rule.GUESSING_ONLY,
            "drafter",
            "ngram",
            "only with num_speculative_tokens above 0: nothing is guessed here",
            "leave it out, or set num_speculative_tokens",
        ),
        (
            P,
            {"num_speculative_tokens": 1, "drafter": "ngram", "mtp_draft_body_tp1": True},
            Rule.GUESSING_ONLY,
            "mtp_draft_body_tp1",
            "1",
            "only with num_speculative_tokens above 0 and drafter=mtp: there is no draft head here",
            "set it to 0, or let the draft head guess",
        ),
        (
            D,
            {"tp": 4, "dcp": 2, "num_speculative_tokens": 1, "mtp_draft_body_tp1": True},
            Rule.DRAFT_SHARED,
            "mtp_draft_body_tp1",
            "1",
            "must be 0 with dcp=2: ranks that share the blocks of a sequence share the draft's heads too",
            "set it to 0, or set dcp=1",
        ),
        (
            P,
            {"graph": True},
            Rule.NOT_BUILT,
            "graph",
            "1",
            "must be 0, nothing else is built yet: steps are computed as they come",
            "leave it out",
        ),
        (
            M,
            {"decode_no_padding": True},
            Rule.NOT_BUILT,
            "decode_no_padding",
            "1",
            "must be 0, nothing else is built yet: nothing is captured, so nothing is padded",
            "leave it out",
        ),
        (
            P,
            {"prefix_cache": True},
            Rule.NOT_BUILT,
            "prefix_cache",
            "1",
            "must be 0, nothing else is built yet: every prompt is computed from its beginning",
            "leave it out",
        ),
        (
            D,
            {"schedule_overlap": True},
            Rule.NOT_BUILT,
            "schedule_overlap",
            "1",
            "must be 0, nothing else is built yet: a step is planned when the one before has been computed",
            "leave it out",
        ),
        (
            M,
            {"priority_strategy": "deadline"},
            Rule.NOT_BUILT,
            "priority_strategy",
            "deadline",
            "must be arrival, nothing else is built yet: whoever came first goes first",
            "leave it out",
        ),
        (
            D,
            {"graph_double_buffer": True},
            Rule.DOUBLE_BUFFER,
            "graph_double_buffer",
            "1",
            "must be 0: a step is told what the one before has chosen, so that no two of them can be under way at once",
            "leave it out",
        ),
    ],
)
def test_a_refusal_says(  # noqa: PLR0917 - a row of the table
    role: WorkerRole, values: dict[str, Any], rule: Rule, key: str, value: str, text: str, remedy: str
) -> None:
    """One setting is wrong, and the refusal names it with its value, the rule, and what to change."""
    (refusal,) = judge(settings(**values), role, FakeModel()).refusals
    for_one = rule is Rule.PULL_ONLY  # set for everybody it reaches those whom it concerns
    assert refusal == Refusal(rule=rule, key=key, value=value, text=text, remedy=remedy, addressed_only=for_one)


def test_what_was_not_shown_to_work_with_dcp_is_told_beside_its_own_rule() -> None:
    """Two rules, each with its remedy."""
    verdict = judge(settings(tp=4, dcp=2, layerwise_kv_sharding=True), D, FakeModel())
    assert verdict.refusals[0] == Refusal(
        rule=Rule.DCP_VALIDATED,
        key="layerwise_kv_sharding",
        value="1",
        text="must be its default with dcp=2: this value has not been shown to work there",
        remedy="leave layerwise_kv_sharding out, or set dcp=1",
    )
    assert [refusal.rule for refusal in verdict.refusals] == [Rule.DCP_VALIDATED, Rule.LAYERWISE]


def test_without_a_model_dcp_divides_tp() -> None:
    """As much as can be said without its heads; a tp that any model might have is fine."""
    assert judge(settings(tp=6, dcp=4), D, None).refusals == (
        Refusal(rule=Rule.DCP_CUT, key="dcp", value="4", text="divides tp = 6", remedy="set dcp to a divisor of tp"),
    )
    assert judge(settings(tp=6, dcp=3), D, None).refusals == ()


def test_the_way_back_from_pieces_with_dcp_is_one_that_nobody_refuses() -> None:
    """Whole prompts do not go with memory that grows: where it does, both are to be changed."""
    growing = settings(tp=4, dcp=2, reserve_output_tokens=8)
    (refusal,) = judge(growing, M, FakeModel()).refusals
    assert refusal.remedy.startswith("set chunked_prefill=0 and reserve_output_tokens=0 (")
    allowed = msgspec.structs.replace(growing, experimental_dcp_chunked_prefill=True)
    (caution,) = judge(allowed, M, FakeModel()).cautions
    assert caution.remedy == "to roll back set chunked_prefill=0 and reserve_output_tokens=0, or dcp=1"
    whole = msgspec.structs.replace(growing, chunked_prefill=False, reserve_output_tokens=0)
    assert judge(whole, M, FakeModel()).refusals == ()


def test_the_warning_and_what_settings_come_to_say() -> None:
    """Every switch that has another effect than its value, in the order of the list, with the reason."""
    made = settings(tp=4, dcp=2, experimental_dcp_chunked_prefill=True)
    verdict = judge(made, M, FakeModel())
    assert verdict.cautions == (
        Caution(
            name="dcp_chunked_prefill_not_bitwise",
            text="prompts are computed in pieces with dcp=2: answers need not be those of dcp=1 bit for bit",
            remedy="to roll back set chunked_prefill=0, or dcp=1",
        ),
    )
    apart = Resolved(
        key="mix_batch", value=True, effective=False, reason="with dcp=2 prompts and decoding do not share steps"
    )
    interleave = Resolved(key="dcp_interleave", value=0, effective=16, reason="0 means block_size")
    assert verdict.resolved == (interleave, apart)
    pulling = settings(tp=4, dcp=2, transfer=Transfer.PULL)
    assert judge(pulling, D, FakeModel()).resolved == (
        interleave,
        Resolved(key="chunked_prefill", value=True, effective=False, reason="a decode worker computes no prompts"),
        apart,
        Resolved(key="num_staging_rows", value=0, effective=32, reason="0 means num_slots"),
    )
    named = settings(transfer=Transfer.PULL, num_staging_rows=4)
    assert judge(named, P, FakeModel()).resolved == (
        Resolved(key="num_staging_rows", value=4, effective=0, reason="a prefill worker pulls nothing"),
    )
    pushed = settings(pull=PulledRoles.ALL, parallel_shard_pull=False, num_staging_rows=4)
    given = {"pull": "all", "parallel_shard_pull": False, "num_staging_rows": 4}
    assert [each for each in judge(pushed, D, FakeModel()).resolved if each.key in given] == [
        Resolved(key=key, value=value, effective="nothing", reason="this worker has transfer=push")
        for key, value in given.items()
    ]
