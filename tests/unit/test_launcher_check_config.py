"""`pdmesh check-config`: what `up` would say of the same flags, file and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.runtime.settings import SettingsError
from services.launcher.app import EXIT_CLEAN, EXIT_SETTINGS, cautions, run
from services.launcher.arguments import SHIPPED_MODEL, mesh_request, parse
from services.launcher.plan import MeshCheck, MeshPlan, check_mesh, make_plan
from services.launcher.settings import settings_structs
from services.launcher.show_check import render_check

GOOD = ("--prefill", "tp=2", "--decode", "tp=4,dcp=2")
REFUSED = (
    "--prefill",
    "",
    "--mixed",
    "tp=4,dcp=2,chunked_prefill=1",
    "--decode",
    "tp=2,dcp=2,block_size=32",
    "--set",
    "colour=red",
)


def check(*words: str, environ: dict[str, str] | None = None) -> MeshCheck:
    """What is said of a command line."""
    arguments = parse(["check-config", "--model", str(SHIPPED_MODEL), *words])
    return check_mesh(mesh_request(arguments), settings_structs(), environ or {})


def planned(*words: str, environ: dict[str, str] | None = None) -> MeshPlan:
    """The plan of one that may start."""
    found = check(*words, environ=environ)
    assert found.plan is not None, render_check(found)
    return found.plan


def test_a_misspelt_variable_is_told_once_with_what_was_meant() -> None:
    """Every service refuses it; one that has a setting of nearly that name knows what was meant."""
    lines = render_check(check(*GOOD, environ={"PD_NUM_SLTS": "3"})).splitlines()
    assert [line for line in lines if "NUM_SLTS" in line] == [
        "  refused: PD_NUM_SLTS = 3: no such setting; did you mean num_slots?"
    ]


def test_a_mesh_that_may_start_is_told_what_its_settings_come_to() -> None:
    """Nothing is refused; the flags that have no effect are told with the reason."""
    assert render_check(check(*GOOD)).splitlines() == [
        "prefill-0",
        "  nothing to say",
        "decode-0",
        "  dcp_interleave = 0 comes to 16: 0 means block_size",
        "  chunked_prefill = 1 comes to 0: a decode worker computes no prompts",
        "  mix_batch = 1 comes to 0: with dcp=2 prompts and decoding do not share steps",
        "it may start: 0 refused, 0 warned of",
    ]


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (("--decode", "tp=4,dcp=2,layerwise_kv_sharding=1"), {"validated_with_dcp", "no_layerwise_kv_sharding"}),
        (("--decode", "tp=4,dcp=2,graph=1"), {"validated_with_dcp", "not_built_yet"}),
        (
            ("--mixed", "tp=4,dcp=4,reserve_output_tokens=8"),
            {"dcp_ranks_hold_one_kv_head", "dcp_chunked_prefill_is_experimental"},
        ),
    ],
)
def test_two_rules_against_one_value_are_both_told(words: tuple[str, ...], rules: set[str]) -> None:
    """Whoever mends the one would meet the other next."""
    given = ("--prefill", "tp=2") if words[0] == "--decode" else ()
    found = check(*given, *words)
    assert {finding.problem.name for finding in found.findings} == rules


def test_every_refusal_stands_at_its_service_with_its_remedy() -> None:
    """All at once: what concerns the mesh first, then each service with the rule's name and what to change."""
    found = check(*REFUSED)
    assert found.plan is None
    lines = render_check(found).splitlines()
    blocks = {line: place for place, line in enumerate(lines) if not line.startswith(" ")}
    assert list(blocks)[:4] == ["mesh", "prefill-0", "mixed-0", "decode-0"]
    mesh, mixed, decode = (lines[blocks[name] + 1 :] for name in ("mesh", "mixed-0", "decode-0"))
    assert mesh[0] == "  refused: --set colour = red: no such setting"
    assert mesh[1].startswith("  refused: block_size = prefill-0 16, decode-0 32: the same on every")
    assert mixed[0].startswith("  refused: dcp = 2: must be 1 where prompts are computed in pieces")
    assert mixed[1].startswith("    dcp_chunked_prefill_is_experimental: set chunked_prefill=0")
    assert decode[0] == "  refused: dcp = 2: must be 1 where no two ranks hold the same KV head"
    assert decode[1] == "    dcp_ranks_hold_one_kv_head: set dcp to 1, or tp to 4 or 8"
    assert lines[-1] == "it may not start: 4 refused, 0 warned of"


def test_up_refuses_what_the_check_refuses() -> None:
    """It is the same judgement, in one error."""
    arguments = parse(["up", "--model", str(SHIPPED_MODEL), *REFUSED])
    with pytest.raises(SettingsError) as caught:
        make_plan(mesh_request(arguments), settings_structs(), {})
    named = [(problem.key.partition(": ")[0], problem.name) for problem in caught.value.problems if problem.name]
    assert named == [
        ("mixed-0", "dcp_chunked_prefill_is_experimental"),
        ("decode-0", "dcp_ranks_hold_one_kv_head"),
    ]
    assert "dcp_ranks_hold_one_kv_head: set dcp to 1, or tp to 4 or 8" in str(caught.value)
    assert len(caught.value.problems) == len(check(*REFUSED).findings)


def test_how_to_pull_may_be_set_for_everybody_where_some_decode_workers_are_pushed_to() -> None:
    """It holds for those that pull; of the others the check says that it comes to nothing. Given to the role it is refused for those."""
    words = ("--prefill", "", "--decode", "", "--decode", "transfer=pull")
    environ = {"PD_PARALLEL_SHARD_PULL": "0"}
    plan = planned(*words, environ=environ)
    assert [worker.settings.value.parallel_shard_pull for worker in plan.workers if worker.role == "decode"] == [
        False
    ] * 2
    lines = render_check(check(*words, environ=environ)).splitlines()
    told = [line for line in lines if line.startswith("decode-") or "parallel_shard_pull" in line]
    assert told == [
        "decode-0",
        "  parallel_shard_pull = 0 comes to nothing: this worker has transfer=push",
        "decode-1",
    ]
    (found,) = check(*words, "--set", "decode.parallel_shard_pull=0").findings
    assert (found.service, found.problem.key, found.problem.name) == (
        "decode-0",
        "parallel_shard_pull",
        "only_with_pull",
    )


def test_a_warning_says_how_to_roll_back() -> None:
    """The check shows it, and a start says it once for the worker."""
    words = ("--mixed", "tp=4,dcp=2,experimental_dcp_chunked_prefill=1", "--mixed", "tp=2")
    lines = render_check(check(*words)).splitlines()
    assert lines[1].startswith("  warning: prompts are computed in pieces with dcp=2")
    assert lines[2] == "    dcp_chunked_prefill_not_bitwise: to roll back set chunked_prefill=0, or dcp=1"
    assert lines[-1] == "it may start: 0 refused, 1 warned of"
    (told,) = cautions(planned(*words))
    assert told.startswith("mixed-0: prompts are computed in pieces")
    assert "to roll back set chunked_prefill=0" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--prefill", "--decode", "num_speculative_tokens=3", "--decode"),
            {"decode-0": "it guesses nothing: no prefill worker computes the cache that its draft head goes on from"},
        ),
        (
            ("--prefill", "num_speculative_tokens=3", "--decode", "num_speculative_tokens=3,drafter=ngram"),
            {"prefill-0": "it computes the cache of a draft head with which no decode worker guesses"},
        ),
        (("--prefill", "num_speculative_tokens=1", "--prefill", "--decode", "num_speculative_tokens=3"), {}),
        (("--prefill", "--decode", "num_speculative_tokens=3,drafter=ngram"), {}),
        (("--mixed", "num_speculative_tokens=3"), {}),
        (("--prefill", "--decode"), {}),
    ],
)
def test_a_draft_head_that_stands_alone_is_warned_of(words: tuple[str, ...], told: dict[str, str]) -> None:
    """A decode worker without anybody who computes its draft, or the other way round; such a mesh may start all the same."""
    found = check(*words)
    assert found.plan is not None
    cautioned = {name: [each.text for each in verdict.cautions] for name, verdict in found.verdicts.items()}
    assert {name: texts for name, texts in cautioned.items() if texts} == {name: [text] for name, text in told.items()}
    assert [line.partition(":")[0] for line in cautions(found.plan)] == list(told)


SAME: list[tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = [
    (
        {"num_blocks": 64, "decode": {"tp": 4, "dcp": 2}, "prefill": {"tp": 2}},
        ("--set", "num_blocks=64", "--set", "decode.tp=4", "--set", "decode.dcp=2", "--set", "prefill.tp=2"),
        {"PD_NUM_BLOCKS": "64", "PD_DECODE__TP": "4", "PD_DECODE__DCP": "2", "PD_PREFILL__TP": "2"},
    ),
    (
        {"decode": {"transfer": "pull", "pull": "all", "verify_cache": True}, "chunked_prefill": False},
        (
            *("--set", "decode.transfer=pull", "--set", "decode.pull=all", "--set", "decode.verify_cache=1"),
            *("--set", "chunked_prefill=0"),
        ),
        {
            "PD_DECODE__TRANSFER": "pull",
            "PD_DECODE__PULL": "all",
            "PD_DECODE__VERIFY_CACHE": "1",
            "PD_CHUNKED_PREFILL": "0",
        },
    ),
]


@pytest.mark.parametrize(("content", "flags", "environ"), SAME)
def test_a_file_flags_and_variables_give_the_same_configuration(
    content: dict[str, Any], flags: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    """The effective configuration differs in where each value came from, and in nothing else."""
    file = tmp_path / "pd.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    workers = ("--prefill", "", "--decode", "", "--mixed", "tp=1,dcp=1")
    dumps = [
        without_sources(planned(*workers, "--config", str(file))),
        without_sources(planned(*workers, *flags)),
        without_sources(planned(*workers, environ=environ)),
    ]
    assert dumps[0] == dumps[1] == dumps[2]
    assert dumps[0] != without_sources(planned(*workers))


def without_sources(plan: MeshPlan) -> dict[str, Any]:
    """A dump without where its values came from."""
    dump = json.loads(plan.dump())
    return {
        name: {key: {k: v for k, v in row.items() if k != "source"} for key, row in settings.items()}
        for name, settings in dump.items()
    }


def test_the_dump_shows_both_the_flag_and_its_effect() -> None:
    """The user's value stays; what it comes to stands beside it, with the reason, only where that is something else."""
    dump = json.loads(planned(*GOOD, "--set", "mix_batch=1").dump())
    assert dump["decode-0"]["mix_batch"] == {
        "value": True,
        "source": "--set",
        "effective": False,
        "reason": "with dcp=2 prompts and decoding do not share steps",
    }
    assert dump["prefill-0"]["mix_batch"] == {"value": True, "source": "--set"}
    assert dump["decode-0"]["dcp"] == {"value": 2, "source": "SPEC"}


@pytest.mark.parametrize(
    ("words", "status", "begins"),
    [
        ((*GOOD, "--dump"), EXIT_CLEAN, '{\n  "launcher"'),
        (GOOD, EXIT_CLEAN, "prefill-0\n"),
        (REFUSED, EXIT_SETTINGS, "mesh\n"),
        ((*REFUSED, "--dump"), EXIT_SETTINGS, "mesh\n"),
    ],
)
def test_the_command_ends_with_the_status_of_up(
    words: tuple[str, ...], status: int, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for what may start, 2 for what may not; with --dump the same configuration as `up --dump`, and nothing is started."""
    assert run(["check-config", "--model", str(SHIPPED_MODEL), *words]) == status
    shown = capsys.readouterr().out
    assert shown.startswith(begins)
    if status == EXIT_CLEAN and "--dump" in words:
        assert run(["up", "--model", str(SHIPPED_MODEL), *words]) == EXIT_CLEAN
        assert capsys.readouterr().out == shown
