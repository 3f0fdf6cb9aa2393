"""Which combinations of switches a worker may start with: the whole table, against rules that are written down here once more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.engine.fake.model import FakeModel
from common.engine.model.config import load_config
from common.worker.configuration import judge_worker, rules_of
from common.worker.core import compatibility
from common.worker.core.compatibility import Rule, Verdict, judge
from common.worker.core.dcp_validated import WITH_DCP
from common.worker.core.effective import effective_of, is_prefill_chunked
from common.worker.settings import EngineKind, PulledRoles, WorkerSettings
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.pull import Transfer
from contracts.rank import CollectivesKind, DrafterKind
from contracts.workers import WorkerRole

TINY = Path(__file__).parents[2] / "models" / "tiny"
KV_HEADS, HEADS = 2, 8
SWITCHES: dict[str, tuple[Any, ...]] = {
    "role": tuple(WorkerRole),
    "tp": (1, 2, 3, 4, 8),
    "dcp": (1, 2, 4, 8),
    "chunked_prefill": (True, False),
    "experimental_dcp_chunked_prefill": (False, True),
    "mix_batch": (True, False),
    "reserve_output_tokens": (0, 32),
    "dcp_interleave": (0, 16, 8),
    "layerwise_kv_sharding": (False, True),
    "device": ("cpu", "npu"),
}
MOVES: dict[str, tuple[Any, ...]] = {
    "role": tuple(WorkerRole),
    "tp, dcp": ((1, 1), (4, 2), (8, 4)),
    "chunked_prefill": (False,),
    "transfer": tuple(Transfer),
    "pull": tuple(PulledRoles),
    "num_staging_rows": (0, 4, 33),
    "verify_cache": (False, True),
    "transport": tuple(Transport),
    "transport_host": ("127.0.0.1", "0.0.0.0", ""),
    "transport_advertise_host": ("", "node-1"),
    "max_step_tokens": (512, 31, 1_677_529, 1_677_530),
}
GUESSES: dict[str, tuple[Any, ...]] = {
    "role": tuple(WorkerRole),
    "tp, dcp": ((1, 1), (2, 1), (4, 2)),
    "chunked_prefill": (False,),
    "num_speculative_tokens": (0, 1, 3, 8),
    "drafter": ("mtp", "ngram"),
    "mtp_draft_body_tp1": (False, True),
    "max_step_tokens": (4, 9),
    "num_slots": (4,),
    "num_mtp_layers": (0, 1),
    "transfer": tuple(Transfer),
}
LATER: dict[str, tuple[Any, ...]] = {
    "role": tuple(WorkerRole),
    "tp, dcp": ((1, 1), (4, 2)),
    "chunked_prefill": (False,),
    "graph": (False, True),
    "graph_double_buffer": (False, True),
    "decode_no_padding": (False, True),
    "prefix_cache": (False, True),
    "schedule_overlap": (False, True),
    "priority_strategy": ("arrival", "deadline"),
}
NOT_BUILT = ("graph", "decode_no_padding", "prefix_cache", "schedule_overlap")
SIZES: dict[str, tuple[Any, ...]] = {
    "role": tuple(WorkerRole),
    "tp, dcp": ((1, 1), (2, 1), (4, 2), (8, 4)),
    "chunked_prefill": (False, True),
    "dp": (1, 2),
    "collectives": tuple(CollectivesKind),
    "dtype": ("float32", "bfloat16"),
    "block_size": (16, 32),
    "transfer": tuple(Transfer),
    "transport": tuple(Transport),
}


def settings(**values: Any) -> WorkerSettings:
    """A worker of the shipped checkpoint."""
    return WorkerSettings(worker_id="w", model=TINY, **values)


def table(switches: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Every combination."""
    for values in product(*switches.values()):
        row = dict(zip(switches, values, strict=True))
        if "tp, dcp" in row:
            row["tp"], row["dcp"] = row.pop("tp, dcp")
        yield row


def broken(row: dict[str, Any]) -> set[Rule]:
    """What a row breaks, from a list of sentences: none of it is taken from the code under test."""
    at: dict[str, Any] = {"num_slots": 32, "block_size": 16} | row
    role, tp, dcp = at["role"], at["tp"], at["dcp"]
    decodes, computes = role != "prefill", role != "decode"
    cuts = HEADS % tp == 0
    pieces = computes and at["chunked_prefill"]
    pulls, tcp = at.get("transfer") == "pull", at.get("transport") == "tcp"
    host, advertised = at.get("transport_host", "127.0.0.1"), at.get("transport_advertise_host", "")
    depth, drafter, whole = at.get("num_speculative_tokens", 0), at.get("drafter", "mtp"), at.get("mtp_draft_body_tp1")
    later = any(at.get(key) for key in NOT_BUILT) or at.get("priority_strategy", "arrival") != "arrival"
    sentences = {
        Rule.TP: not cuts,
        Rule.DCP_ROLE: not decodes and dcp > 1,
        Rule.DCP_CUT: decodes and cuts and max(1, tp // KV_HEADS) % dcp != 0,
        Rule.DCP_CHUNKED: decodes and dcp > 1 and pieces and not at.get("experimental_dcp_chunked_prefill"),
        Rule.DCP_VALIDATED: decodes
        and dcp > 1
        and (
            at.get("layerwise_kv_sharding")
            or at.get("device", "cpu") != "cpu"
            or later
            or bool(at.get("graph_double_buffer"))
        ),
        Rule.INTERLEAVE: at.get("dcp_interleave", 0) not in {0, at["block_size"]},
        Rule.LAYERWISE: bool(at.get("layerwise_kv_sharding")),
        Rule.DEVICE: at.get("device", "cpu") != "cpu",
        Rule.STEP: at.get("max_step_tokens", 512) < at["num_slots"],
        Rule.STEP_MESSAGE: at.get("max_step_tokens", 512) > 1_677_529,
        Rule.WHOLE_PROMPTS: role == "mixed" and not pieces and bool(at.get("reserve_output_tokens")),
        Rule.PULL_ONLY: role == "decode"
        and not pulls
        and (at.get("pull") == "all" or at.get("num_staging_rows", 0) > 0),
        Rule.STAGING_ROWS: role == "decode" and pulls and at.get("num_staging_rows", 0) > at["num_slots"],
        Rule.NOT_BUILT: later,
        Rule.DOUBLE_BUFFER: bool(at.get("graph_double_buffer")),
        Rule.DRAFT_HEAD: depth > 0 and drafter == "mtp" and not at.get("num_mtp_layers", 1),
        Rule.GUESSES_FIT: decodes and 1 + depth > at.get("max_step_tokens", 512),
        Rule.GUESSING_ONLY: (depth == 0 and (drafter != "mtp" or whole)) or (drafter != "mtp" and whole),
        Rule.DRAFT_SHARED: decodes and dcp > 1 and bool(whole),
        Rule.TCP_ONLY: not tcp and (host != "127.0.0.1" or advertised != ""),
        Rule.TCP_ADDRESS: tcp and (not host or (host == "0.0.0.0" and not advertised)),
    }
    return {rule for rule, is_broken in sentences.items() if is_broken}


def wrong_rows(switches: dict[str, tuple[Any, ...]], role: WorkerRole) -> list[tuple[dict[str, Any], Any]]:
    """Rows of the table that are not judged as the sentences say."""
    found = []
    models = [msgspec.structs.replace(load_config(TINY), num_mtp_layers=count) for count in (0, 1)]
    for row in table(switches | {"role": (role,)}):
        made = settings(**{key: value for key, value in row.items() if key not in {"role", "num_mtp_layers"}})
        verdict = judge(made, role, models[row.get("num_mtp_layers", 1)])
        named = {refusal.rule for refusal in verdict.refusals}
        is_told = all(refusal.key and refusal.text and refusal.remedy for refusal in verdict.refusals)
        if named != broken(row) or not is_told:
            found.append((row, named))
    return found


@pytest.mark.parametrize("role", WorkerRole)
@pytest.mark.parametrize(
    "switches",
    [SWITCHES, MOVES, SIZES, GUESSES, LATER],
    ids=["context parallel", "moves", "sizes", "guesses", "not built"],
)
def test_every_combination_starts_or_names_its_rules(switches: dict[str, tuple[Any, ...]], role: WorkerRole) -> None:
    """No combination starts that a sentence forbids, none is refused that no sentence forbids; each refusal says what to change."""
    assert wrong_rows(switches, role) == []


@pytest.mark.parametrize("hole", compatibility._RULES, ids=lambda rule: rule.__name__.strip("_"))
def test_a_rule_that_is_left_out_is_seen(hole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table turns red when any group of rules is not asked."""
    monkeypatch.setattr(compatibility, "_RULES", tuple(each for each in compatibility._RULES if each is not hole))
    small = {key: values[:1] for key, values in SWITCHES.items()} | {
        "tp": (4,),
        "dcp": (2, 4),
        "device": ("cpu", "npu"),
        "num_staging_rows": (0, 4),
        "transport_advertise_host": ("", "node-1"),
        "max_step_tokens": (512, 31),
        "mtp_draft_body_tp1": (False, True),
    }
    assert wrong_rows(small, WorkerRole.MIXED) + wrong_rows(small, WorkerRole.DECODE)


def test_what_is_new_is_refused_with_dcp_until_it_is_shown_to_work() -> None:
    """A setting that the table of what works does not know may only have its default, whatever it is."""

    class Newer(WorkerSettings, frozen=True, kw_only=True):
        tiles: bool = False

    made = [
        Newer(worker_id="w", model=TINY, tp=4, dcp=dcp, tiles=tiles) for dcp, tiles in product((1, 2), (False, True))
    ]
    verdicts = [judge(each, WorkerRole.DECODE, load_config(TINY)) for each in made]
    assert [[refusal.key for refusal in verdict.refusals] for verdict in verdicts] == [[], [], [], ["tiles"]]
    assert verdicts[3].refusals[0].rule is Rule.DCP_VALIDATED


def test_the_table_of_what_works_names_settings_that_exist() -> None:
    """And only what is refused with and without dcp is left out today."""
    names = {field.name for field in msgspec.structs.fields(WorkerSettings)}
    assert WITH_DCP.keys() <= names
    later = {"layerwise_kv_sharding", "graph_double_buffer", "priority_strategy", *NOT_BUILT}
    assert names - WITH_DCP.keys() == later


def test_both_remedies_of_the_experimental_gate_are_told_and_work() -> None:
    """Chunks with dcp on a mixed worker are refused with two ways out; the second one warns, once, and says how to roll back."""
    refused = judge_worker(settings(tp=4, dcp=2), WorkerRole.MIXED)
    (refusal,) = refused.refusals
    assert refusal.rule is Rule.DCP_CHUNKED
    assert "chunked_prefill=0" in refusal.remedy
    assert "experimental_dcp_chunked_prefill=1" in refusal.remedy
    assert refused.cautions == ()
    assert judge_worker(settings(tp=4, dcp=2, chunked_prefill=False), WorkerRole.MIXED) == Verdict(
        refusals=(), cautions=(), resolved=judge_worker(settings(tp=4, dcp=2), WorkerRole.MIXED).resolved
    )
    allowed = judge_worker(settings(tp=4, dcp=2, experimental_dcp_chunked_prefill=True), WorkerRole.MIXED)
    assert allowed.refusals == ()
    (caution,) = allowed.cautions
    assert caution.name == "dcp_chunked_prefill_not_bitwise"
    assert caution.remedy == "to roll back set chunked_prefill=0, or dcp=1"
    assert judge_worker(settings(experimental_dcp_chunked_prefill=True), WorkerRole.MIXED).cautions == ()


def test_mixed_batches_are_off_with_dcp_and_the_flag_stays() -> None:
    """What was set is not touched: both values are told, with the reason."""
    made = settings(tp=4, dcp=2, chunked_prefill=False)
    assert made.mix_batch is True
    assert effective_of(made, WorkerRole.MIXED).mix_batch is False
    (found,) = [each for each in judge_worker(made, WorkerRole.MIXED).resolved if each.key == "mix_batch"]
    assert (found.value, found.effective) == (True, False)
    assert found.reason == "with dcp=2 prompts and decoding do not share steps"
    alone = msgspec.structs.replace(made, dcp=1)
    assert effective_of(alone, WorkerRole.MIXED).mix_batch is True
    assert judge_worker(alone, WorkerRole.MIXED).resolved == ()
    assert effective_of(settings(mix_batch=False), WorkerRole.MIXED).mix_batch is False


def test_whether_prompts_are_chunked_depends_on_the_role() -> None:
    """A decode worker computes none, so its flag means nothing; without chunks a step bounds the prompt."""
    made = settings(max_step_tokens=100)
    assert [is_prefill_chunked(made, role) for role in WorkerRole] == [True, False, True]
    assert [effective_of(made, role).max_prompt_tokens for role in WorkerRole] == [None, None, None]
    whole = msgspec.structs.replace(made, chunked_prefill=False)
    assert [effective_of(whole, role).chunked_prefill for role in WorkerRole] == [False, False, False]
    assert [effective_of(whole, role).max_prompt_tokens for role in WorkerRole] == [100, None, 100]


def test_remedies_name_numbers_that_work() -> None:
    """What a refusal suggests is legal."""
    refusals = [
        *judge_worker(settings(tp=3), WorkerRole.PREFILL).refusals,
        *judge_worker(settings(tp=4, dcp=4), WorkerRole.DECODE).refusals,
    ]
    assert [refusal.remedy for refusal in refusals] == [
        "set tp to 1 or 2 or 4 or 8",
        "set dcp to 1 or 2, or tp to 8",
    ]


def test_without_a_readable_checkpoint_the_ranks_decide(tmp_path: Path) -> None:
    """Its heads are unknown; that dcp divides tp needs none."""
    unread = WorkerSettings(worker_id="w", model=tmp_path, tp=6, dcp=4)
    assert [problem.name for problem in rules_of(WorkerRole.DECODE)(unread)] == [Rule.DCP_CUT]
    assert rules_of(WorkerRole.DECODE)(msgspec.structs.replace(unread, dcp=3)) == []


def test_fake_engines_have_heads_of_their_own() -> None:
    """Two KV heads, four of the others: they are cut like a model's."""
    model = FakeModel()
    for tp in (1, 2, 4):
        model.check_tensor_parallel(tp)
    for tp in (3, 8):
        with pytest.raises(InvalidValueError, match="tp"):
            model.check_tensor_parallel(tp)
    model.check_context_parallel(4, 2)
    with pytest.raises(InvalidValueError, match="dcp"):
        model.check_context_parallel(2, 2)
    fake = settings(engine=EngineKind.FAKE, tp=8)
    assert [refusal.rule for refusal in judge_worker(fake, WorkerRole.DECODE).refusals] == [Rule.TP]


def test_a_prefill_worker_keeps_the_draft_for_those_who_guess() -> None:
    """One setting for all roles: decode and mixed guess, prefill has the draft head and no guesses; of an n-gram nothing is kept."""
    for drafter, kept in (("mtp", DrafterKind.MTP), ("ngram", DrafterKind.NONE)):
        made = settings(num_speculative_tokens=3, drafter=drafter)
        effective = {role: effective_of(made, role) for role in WorkerRole}
        assert {role: (each.num_speculative_tokens, each.drafter) for role, each in effective.items()} == {
            WorkerRole.PREFILL: (0, kept),
            WorkerRole.DECODE: (3, DrafterKind(drafter)),
            WorkerRole.MIXED: (3, DrafterKind(drafter)),
        }
    told = judge_worker(settings(num_speculative_tokens=3), WorkerRole.PREFILL).resolved
    assert [(each.key, each.value, each.effective, each.reason) for each in told] == [
        (
            "num_speculative_tokens",
            3,
            0,
            "a prefill worker guesses nothing: it keeps the draft head's cache for those who do",
        )
    ]
    told = judge_worker(settings(num_speculative_tokens=3, drafter="ngram"), WorkerRole.PREFILL).resolved
    assert [(each.key, each.effective, each.reason) for each in told] == [
        ("num_speculative_tokens", 0, "a prefill worker guesses nothing"),
        ("drafter", "none", "a prefill worker has nothing to keep for an n-gram drafter"),
    ]
    assert judge_worker(settings(), WorkerRole.PREFILL).resolved == ()
    assert effective_of(settings(), WorkerRole.MIXED).drafter is DrafterKind.NONE
