"""Meshes that have a name: what they are, and that whatever is given beside them wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.runtime.settings import SettingsError
from loadtest.mesh import MeshSpec
from services.launcher.app import EXIT_CLEAN, EXIT_SETTINGS, run
from services.launcher.arguments import SHIPPED_MODEL, mesh_request, parse
from services.launcher.core.presets import PRESETS
from services.launcher.plan import MeshPlan, make_plan
from services.launcher.settings import settings_structs


def plan(*words: str, **environ: str) -> MeshPlan:
    """What `pdmesh up` with these words would start, of the shipped checkpoint."""
    return make_plan(mesh_request(parse(["up", "--model", str(SHIPPED_MODEL), *words])), settings_structs(), environ)


def told(mesh: MeshPlan, worker: str, *keys: str) -> list[tuple[Any, str]]:
    """The value of each setting of a worker, and where it came from."""
    shown = json.loads(mesh.dump())[worker]
    return [(shown[key]["value"], shown[key]["source"]) for key in keys]


@pytest.mark.parametrize("depth", [3, 5])
def test_the_preset_is_the_designs_set(depth: int) -> None:
    """Prefill on two ranks pushes to decode on one, the draft head whole on each, as deep as the name says; each value is its own."""
    name = f"p2d1-mtp{depth}"
    mesh = plan("--preset", name)
    assert [(worker.name, worker.settings.value.tp) for worker in mesh.workers] == [("prefill-0", 2), ("decode-0", 1)]
    common = {
        "num_speculative_tokens": depth,
        "drafter": "mtp",
        "mtp_draft_body_tp1": True,
        "graph_double_buffer": False,
        "prefix_cache": False,
        "chunked_prefill": True,
    }
    for worker in ("prefill-0", "decode-0"):
        assert told(mesh, worker, *common) == [(value, f"preset {name}") for value in common.values()]
    assert told(mesh, "decode-0", "transfer", "graph") == [("push", f"preset {name}"), (False, "default")]


@pytest.mark.parametrize("switch", ["graph", "decode_no_padding", "schedule_overlap", "graph_double_buffer"])
def test_what_the_design_has_beside_it_is_refused_by_name(switch: str) -> None:
    """Nothing that is not built is taken in silence."""
    with pytest.raises(SettingsError, match=f"{switch} = 1"):
        plan("--preset", "p2d1-mtp3", "--set", f"{switch}=1")


def test_whatever_is_given_beside_a_preset_wins(tmp_path: Path) -> None:
    """Variables, a config file, --set, and a worker's SPEC, each over the preset's own value for all or for one role."""
    config = tmp_path / "mesh.json"
    config.write_text('{"mtp_draft_body_tp1": false, "decode": {"transfer": "pull"}}', encoding="utf-8")
    words = ("--preset", "p2d1-mtp3", "--config", str(config), "--set", "num_speculative_tokens=1")
    mesh = plan(*words, "--decode", "tp=4", PD_PREFILL__TP="1")
    assert told(mesh, "decode-0", "tp", "transfer", "num_speculative_tokens", "mtp_draft_body_tp1") == [
        (4, "SPEC"),
        ("pull", str(config)),
        (1, "--set"),
        (False, str(config)),
    ]
    assert told(mesh, "prefill-0", "tp", "chunked_prefill") == [(1, "PD_PREFILL__TP"), (True, "preset p2d1-mtp3")]


def test_workers_beside_a_preset_replace_those_of_their_role() -> None:
    """Two decode workers instead of one, each with the preset's settings; a mixed one comes beside the pair."""
    mesh = plan(
        "--preset",
        "p2d1-mtp3",
        "--decode",
        "--decode",
        "tp=2",
        "--mixed",
        "num_speculative_tokens=0,mtp_draft_body_tp1=0",
    )
    assert [(worker.name, worker.settings.value.tp) for worker in mesh.workers] == [
        ("prefill-0", 2),
        ("decode-0", 1),
        ("decode-1", 2),
        ("mixed-0", 1),
    ]
    assert [worker.settings.value.num_speculative_tokens for worker in mesh.workers] == [3, 3, 3, 0]


def test_every_preset_may_start_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the shipped checkpoint; the help names all of them, and another name is refused."""
    for name in PRESETS:
        assert run(["check-config", "--model", str(SHIPPED_MODEL), "--preset", name]) == EXIT_CLEAN
    shown = capsys.readouterr().out
    assert "a prefill worker guesses nothing: it keeps the draft head's cache for those who do" in shown
    with pytest.raises(SystemExit, match="0"):
        run(["up", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{each.name}: {each.text}" in text for each in PRESETS.values())
    with pytest.raises(SystemExit, match=str(EXIT_SETTINGS)):
        run(["up", "--preset", "p2d1-mtp4"])
    assert "argument --preset: invalid choice: 'p2d1-mtp4'" in capsys.readouterr().err


def test_a_mesh_to_load_knows_the_workers_of_its_preset() -> None:
    """Their ids are those that the launcher gives them, and what is given beside the preset replaces them there too."""
    spec = MeshSpec(mode="m", model=SHIPPED_MODEL, workers=(), preset="p2d1-mtp3")
    assert (spec.worker_ids("prefill"), spec.worker_ids("decode")) == (("prefill-0",), ("decode-0",))
    assert spec.is_disaggregated()
    two = MeshSpec(mode="m", model=SHIPPED_MODEL, workers=(("decode", ""), ("decode", "id=d")), preset="p2d1-mtp3")
    assert two.worker_ids("decode") == ("decode-0", "d")
    words = two.command(port=1, nats_port=2, logs=Path("logs"))
    assert words[words.index("--preset") + 1] == "p2d1-mtp3"
