"""A mesh is checked whole before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from common.runtime.settings import SettingsError, load
from common.worker.settings import WorkerSettings
from services.launcher.arguments import SHIPPED_MODEL, mesh_request, parse
from services.launcher.plan import MeshPlan, MeshRequest, make_plan, settings_json
from services.launcher.settings import LauncherSettings, SettingsStructs


class _Router(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan needs of a router's settings."""

    model: Path
    nats_url: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    expected_workers: tuple[str, ...] = ()
    request_timeout_s: float = 600.0


class _Broker(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan needs of a broker's settings."""

    broker_id: str = "broker-0"
    nats_url: str = ""
    drain_timeout_s: float = 30.0
    record_ttl_s: float = 3600.0
    admin_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    admin_host: str = "127.0.0.1"


_STRUCTS = SettingsStructs(
    by_role={
        "router": _Router,
        "broker": _Broker,
        **dict.fromkeys(("prefill", "decode", "mixed"), WorkerSettings),
        "launcher": LauncherSettings,
    }
)
_PAIR = (("prefill", "tp=2"), ("decode", ""))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that looks like a checkpoint."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return str(tmp_path)


def _plan(model: str | None, *workers: tuple[str, str], environ: dict[str, str] | None = None, **rest: Any) -> MeshPlan:
    request = MeshRequest(model=model, workers=workers or _PAIR, **rest)
    return make_plan(request, _STRUCTS, environ or {})


def _problems(model: str | None, *workers: tuple[str, str], **rest: Any) -> list[str]:
    with pytest.raises(SettingsError) as refusal:
        _plan(model, *workers, **rest)
    return [f"{problem.key} = {problem.value}: {problem.rule}" for problem in refusal.value.problems]


def test_workers_that_could_never_be_linked_are_refused(model: str) -> None:
    """Block size, dtype and transport are named, with who has which, before anything starts; a mixed worker may differ."""
    problems = _problems(model, ("prefill", "block_size=16"), ("decode", "block_size=32,dtype=bfloat16,transport=tcp"))
    assert any("block_size" in problem and "prefill-0 16, decode-0 32" in problem for problem in problems)
    assert any("dtype" in problem for problem in problems)
    assert any("transport" in problem and "prefill-0 shm, decode-0 tcp" in problem for problem in problems)
    assert len(_plan(model, ("prefill", ""), ("decode", ""), ("mixed", "block_size=32")).workers) == 3


def test_a_model_that_cannot_be_cut_into_so_many_ranks_is_refused(model: str) -> None:
    """Each worker is named, with the rule that its ranks would name; a fake engine has heads of its own."""
    workers = (("prefill", "tp=3"), ("decode", "tp=2"), ("mixed", "tp=16"))
    assert _problems(str(SHIPPED_MODEL), *workers) == [
        "prefill-0: tp = 3: divides num_attention_heads (8)",
        "mixed-0: tp = 16: divides num_attention_heads (8)",
    ]
    fake = [(role, f"{spec},engine=fake") for role, spec in workers]
    assert [problem.partition(":")[0] for problem in _problems(str(SHIPPED_MODEL), *fake)] == ["prefill-0", "mixed-0"]
    assert len(_plan(model, *workers).workers) == 3, "what is in an unreadable checkpoint is the workers' to tell"


def test_a_server_that_is_no_url_is_refused(model: str) -> None:
    """Before the services would each look for a host of that name."""
    (problem,) = _problems(model, overrides=("nats_url=garbage",))
    assert problem.startswith("nats_url = garbage: a URL of the form nats://host:port")


def test_a_fixed_port_for_two_services_is_refused(model: str) -> None:
    """All that would listen there are named, the router's port among them; free ports and other addresses do not clash."""
    assert _problems(
        model, ("prefill", "admin_port=9100"), ("decode", "admin_port=9100"), ("mixed", "admin_port=9101")
    ) == ["prefill-0 admin_port, decode-0 admin_port = 9100: a port for each of them, or 0 for a free one"]
    everywhere = (("prefill", "admin_port=8000,admin_host=0.0.0.0"), ("decode", "admin_port=0"))
    (problem,) = _problems(model, *everywhere)
    assert problem.startswith("router port, prefill-0 admin_port = 8000: ")
    elsewhere = (("prefill", "admin_port=9100"), ("decode", "admin_port=9100,admin_host=127.0.0.2"))
    assert len(_plan(model, *elsewhere).workers) == 2


def test_requests_that_would_outlive_their_records_are_refused(model: str) -> None:
    """The broker would refuse each of them; exactly as long is taken."""
    rule = "at most broker.record_ttl_s, 3600: no request outlives its record; change one of the two"
    overrides = ("router.request_timeout_s=7200", "brokers=2")
    assert _problems(model, overrides=overrides) == [f"router.request_timeout_s = 7200: {rule}"]
    assert len(_plan(model, overrides=(*overrides, "broker.record_ttl_s=7200")).brokers) == 2


def test_workers_are_numbered_by_role(model: str) -> None:
    """A role given twice makes two workers; an id in the SPEC names one, and does not use up a number."""
    plan = _plan(model, ("prefill", "tp=2"), ("decode", "id=big,tp=4"), ("decode", ""), ("prefill", "tp=1"))
    assert [worker.name for worker in plan.workers] == ["prefill-0", "big", "decode-0", "prefill-1"]
    assert [worker.settings.value.worker_id for worker in plan.workers] == [worker.name for worker in plan.workers]
    assert [worker.settings.value.tp for worker in plan.workers] == [2, 4, 1, 1]
    assert plan.router.settings.value.expected_workers == ("prefill-0", "big", "decode-0", "prefill-1")


def test_brokers_that_stand_by_are_alike_but_for_their_ids(model: str) -> None:
    """The first keeps the role's name and the id that it was given; a fixed port is for one of them only."""
    plan = _plan(model, overrides=("brokers=3", "drain_timeout_s=3"))
    assert [service.name for service in plan.services[:3]] == ["broker", "broker-1", "broker-2"]
    values = [broker.settings.value for broker in plan.brokers]
    assert [value.broker_id for value in values] == ["broker-0", "broker-1", "broker-2"]
    assert {value.drain_timeout_s for value in values} == {3.0}
    (problem,) = _problems(model, overrides=("brokers=2", "broker.admin_port=9100"))
    assert problem.startswith("broker admin_port, broker-1 admin_port = 9100")


def test_no_restart_is_a_setting_of_the_launcher(model: str) -> None:
    """The flag and the setting say the same."""
    assert _plan(model).launcher.restarts_per_minute == 5
    assert _plan(model, restart=False).launcher.restarts_per_minute == 0
    assert _plan(model, overrides=("restarts_per_minute=1",)).launcher.restarts_per_minute == 1


def test_each_place_reaches_who_it_is_meant_for(model: str) -> None:
    """SPEC wins over `--set`, which reaches every service that knows the key, or the one role that it names."""
    plan = _plan(
        model,
        ("prefill", "num_blocks=8"),
        ("decode", ""),
        port=9000,
        overrides=("num_blocks=32", "decode.tp=4", "drain_timeout_s=3"),
        environ={"PD_TP": "2", "HOME": "/nowhere"},
    )
    prefill, decode = (worker.settings.value for worker in plan.workers)
    assert (prefill.num_blocks, decode.num_blocks, prefill.tp, decode.tp) == (8, 32, 2, 4)
    assert (plan.router.settings.value.port, plan.brokers[0].settings.value.drain_timeout_s) == (9000, 3.0)
    assert str(plan.router.settings.value.model) == str(prefill.model) == model


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    """One start is enough to learn of every mistake, each told once."""
    problems = _problems(
        str(tmp_path),
        ("prefill", "tp=zero,colour=red"),
        ("decode", "tp=0"),
        ("decode", "tp"),
        overrides=("nonsense=1", "router.port=99999", "mixed.nothing=1"),
        environ={"PD_TPP": "2"},
    )
    expected = {
        "prefill-0: tp = zero",
        "prefill-0: colour = red",
        "decode-0: tp = 0",
        "--decode: SPEC = 'tp'",
        "--set nonsense = 1",
        "--set router.port = 99999",
        "--set mixed.nothing = 1",
        "PD_TPP = 2",
        f"--model = {tmp_path}",
    }
    for start in expected:
        assert sum(problem.startswith(f"{start}: ") for problem in problems) == 1, (start, problems)
    assert len(problems) == len(expected)


def test_a_bad_choice_is_told_beside_other_mistakes(tmp_path: Path) -> None:
    """Neither a variable that nobody knows nor a wrong config file hides it, and it is told once for all workers."""
    config = tmp_path / "pd.json"
    config.write_text('{"colour": "red"}', encoding="utf-8")
    environ = {"PD_DTYPE": "bfloat99", "PD_FOO": "1"}
    problems = _problems(None, config_file=config, environ=environ)
    assert "PD_DTYPE = bfloat99: one of bfloat16, float32" in problems
    starts = sorted(problem.partition(" = ")[0] for problem in problems if "model" not in problem)
    assert starts == sorted([f"{config}: colour", "PD_DTYPE", "PD_FOO"])


@pytest.mark.parametrize(
    ("workers", "shown"),
    [((("prefill", ""),), "workers = prefill"), ((("decode", ""), ("decode", "")), "workers = decode")],
)
def test_a_mesh_can_serve(model: str, workers: tuple[tuple[str, str], ...], shown: str) -> None:
    """Without both sides and without a mixed worker no request could ever be served."""
    rule = "at least one --prefill and one --decode, or one --mixed"
    assert _problems(model, *workers) == [f"{shown}: {rule}"]


def test_no_workers_at_all_is_told(model: str) -> None:
    """The empty mesh is no mesh."""
    with pytest.raises(SettingsError, match=r"workers = \(none\)"):
        make_plan(MeshRequest(model=model, workers=()), _STRUCTS, {})


def test_a_mixed_worker_is_enough(model: str) -> None:
    """It does both."""
    assert [worker.name for worker in _plan(model, ("mixed", "")).workers] == ["mixed-0"]


def test_ids_differ(model: str) -> None:
    """Two workers of one name would take each other's subjects."""
    problems = _problems(model, ("prefill", "id=a"), ("decode", "worker_id=a"), ("decode", "id=b,worker_id=c"))
    assert problems == [
        "--decode id = b: either id or worker_id",
        "worker_id = a: ids differ; this one is given to 2 workers",
    ]


def test_a_worker_needs_a_legal_name(model: str) -> None:
    """Names become tokens of subjects."""
    (problem,) = _problems(model, ("mixed", "id=Big One"))
    assert problem.startswith("Big One: worker_id = Big One: 1 to 63 characters")


def test_a_missing_model_is_told_by_those_who_need_it() -> None:
    """Each service says that it lacks the value."""
    assert len(_problems(None)) == 3


def test_a_child_reads_back_what_was_planned(model: str, tmp_path: Path) -> None:
    """The file that a service is started with gives it exactly the planned settings, and the values of this start."""
    worker = _plan(model, ("mixed", "tp=2"), overrides=("num_slots=7",)).workers[0].settings.value
    file = tmp_path / "settings.json"
    file.write_bytes(settings_json(worker, nats_url="nats://127.0.0.1:9"))
    loaded = load(WorkerSettings, role="mixed", config_file=file, environ={}).value
    assert loaded == msgspec.structs.replace(worker, nats_url="nats://127.0.0.1:9")


def test_the_dump_names_each_source(model: str) -> None:
    """People can see what a setting is and who set it; passwords stay hidden."""
    plan = _plan(model, ("mixed", "tp=2"), overrides=("nats_url=nats://me:word@host:1",))
    dump = json.loads(plan.dump())
    assert dump["mixed-0"]["tp"] == {"value": 2, "source": "SPEC"}
    assert dump["mixed-0"]["num_slots"]["source"] == "default"
    assert dump["broker"]["nats_url"] == {"value": "nats://***@host:1", "source": "--set"}
    assert "word" not in plan.dump()


def test_the_dump_tells_who_decides(model: str) -> None:
    """Flags and the launcher are sources, too; what the start decides is said to be so; the launcher shows its own settings."""
    workers = (("mixed", ""), ("mixed", "id=big,transport_dir=/run/pd"))
    dump = json.loads(_plan(model, *workers, port=9000, environ={"PD_LOG_DIR": "/var/log/pd"}).dump())
    later = {"value": "decided at start", "source": "launcher"}
    assert dump["launcher"]["log_dir"] == {"value": "/var/log/pd", "source": "PD_LOG_DIR"}
    assert {name: dump[name]["nats_url"] for name in ("broker", "router", "mixed-0", "big")} == dict.fromkeys(
        ("broker", "router", "mixed-0", "big"), later
    )
    assert dump["router"]["port"] == {"value": 9000, "source": "--port"}
    assert dump["router"]["expected_workers"]["source"] == "launcher"
    for name in ("router", "mixed-0", "big"):
        assert dump[name]["model"] == {"value": model, "source": "--model"}
    assert [dump[name]["worker_id"]["source"] for name in ("mixed-0", "big")] == ["launcher", "SPEC"]
    assert dump["mixed-0"]["transport_dir"] == later
    assert dump["big"]["transport_dir"] == {"value": "/run/pd", "source": "SPEC"}


def test_the_dump_shows_the_server_that_all_will_use(model: str) -> None:
    """Children get the launcher's server, so an address for one role alone would not hold, and is not shown."""
    overrides = ("launcher.nats_url=nats://host:1", "broker.nats_url=nats://other:1")
    dump = json.loads(_plan(model, ("mixed", ""), overrides=overrides).dump())
    assert {dump[name]["nats_url"]["value"] for name in dump} == {"nats://host:1"}


def test_the_command_line_keeps_the_order_of_workers() -> None:
    """Flags may be repeated and mixed; a flag without SPEC is a worker with defaults."""
    arguments = parse(["up", "--model", "m", "--prefill", "tp=2", "--decode", "--prefill", "tp=4", "--set", "tp=1"])
    request = mesh_request(arguments)
    assert request.workers == (("prefill", "tp=2"), ("decode", ""), ("prefill", "tp=4"))
    assert (request.model, request.port, request.overrides) == ("m", None, ("tp=1",))


def test_the_demo_needs_no_arguments() -> None:
    """It takes the shipped checkpoint, two prefill ranks and one decode rank."""
    request = mesh_request(parse(["demo"]))
    assert request.workers == (("prefill", "tp=2"), ("decode", "tp=1"))
    assert request.model == str(SHIPPED_MODEL)


@pytest.mark.parametrize(
    "words", [["up", "--prefil", "tp=2"], ["up", "--mod", "x"], ["demo", "--se", "tp=1"], ["events", "--al"]]
)
def test_the_beginning_of_an_option_is_no_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is misspelt or cut off is told, and never taken for what it may have meant."""
    with pytest.raises(SystemExit):
        parse(words)
    assert words[1] in capsys.readouterr().err
