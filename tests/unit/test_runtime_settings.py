"""Settings: precedence, reach, and that everything wrong is told at once."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from common.runtime.settings import (
    SettingsError,
    SettingsProblem,
    keys_of,
    load,
    load_from_arguments,
    parse_spec,
    split_overrides,
)


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A service's settings, with one field of each kind."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    ratio: float = 0.5
    compiled: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    names: tuple[str, ...] = ()
    model: Path = Path("models/tiny")
    nats_url: str = "nats://127.0.0.1:4222"
    admin_token: str = ""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with a required field and a rule over two fields."""

    low: int
    high: int = 10

    def __post_init__(self) -> None:
        """Check the rule."""
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is at most high ({self.high})")


def problems_of(error: pytest.ExceptionInfo[SettingsError]) -> dict[str, str]:
    """Key -> rule of every reported problem."""
    return {problem.key: problem.rule for problem in error.value.problems}


def test_each_place_overrides_the_ones_below_it(tmp_path: Path) -> None:
    """SPEC > --set > PD_* > config file > default, key by key, with the source of each."""
    config = tmp_path / "pd.json"
    config.write_text(json.dumps({"tp": 2, "ratio": 0.1, "compiled": True, "device": "cuda"}))
    loaded = load(
        Example,
        role="decode",
        spec="tp=5",
        overrides=["tp=4", "ratio=0.3"],
        environ={"PD_TP": "3", "PD_RATIO": "0.2", "PD_COMPILED": "0", "HOME": "/"},
        config_file=config,
    )
    assert loaded.value == Example(tp=5, ratio=0.3, compiled=False, device="cuda")
    assert loaded.sources == {
        "tp": "SPEC",
        "ratio": "--set",
        "compiled": "PD_COMPILED",
        "device": str(config),
        "names": "default",
        "model": "default",
        "nats_url": "default",
        "admin_token": "default",
    }


def test_what_is_addressed_to_the_role_wins_within_one_place(tmp_path: Path) -> None:
    """`role.key` beats `key` whatever their order, and what is addressed to other roles is passed over."""
    config = tmp_path / "pd.json"
    config.write_text(json.dumps({"decode": {"tp": 2}, "prefill": {"tp": 8, "unheard": 1}, "tp": 4}))
    assert load(Example, role="decode", config_file=config, environ={}).value.tp == 2
    environ = {"PD_DECODE__TP": "3", "PD_TP": "4", "PD_PREFILL__TP": "8"}
    assert load(Example, role="decode", environ=environ).value.tp == 3
    overrides = ["decode.tp=6", "prefill.tp=8", "tp=7"]
    assert load(Example, role="decode", environ={}, overrides=overrides).value.tp == 6


def test_the_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """PD_CONFIG names the file and is not itself a setting."""
    config = tmp_path / "pd.json"
    config.write_text('{"tp": 2}')
    assert load(Example, role="decode", environ={"PD_CONFIG": str(config)}).value.tp == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("compiled=1", Example(compiled=True)),
        ("compiled=False", Example(compiled=False)),
        ("names=a", Example(names=("a",))),
        ("names=a,b", Example(names=("a", "b"))),
        ('names=["a","b"]', Example(names=("a", "b"))),
        ("model=/m", Example(model=Path("/m"))),
        ("nats_url=nats://h:1", Example(nats_url="nats://h:1")),
    ],
)
def test_text_is_read_by_the_type_of_its_field(text: str, expected: Example) -> None:
    """Booleans take 0/1/true/false, sequences a comma list or JSON, paths and texts themselves."""
    assert load(Example, role="decode", environ={}, overrides=[text]).value == expected


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """A bad value, a broken rule, unknown keys and a bad form from every place are in one error, with hints."""
    config = tmp_path / "pd.json"
    config.write_text(json.dumps({"tp": "two", "colour": "red"}))
    with pytest.raises(SettingsError) as caught:
        load(
            Example,
            role="decode",
            spec="tp=9",
            overrides=["ratoi=1", "nonsense", "decoed.tp=1"],
            environ={"PD_COMPILED": "yes", "PD_MODLE": "x", "PD_RUOTER__TP": "1"},
            config_file=config,
        )
    rules = problems_of(caught)
    assert rules["tp"] == rules[f"{config}: tp"] == "a whole number 1 to 8"
    assert rules[f"{config}: colour"] == "no such setting"
    assert rules["--set ratoi"] == "no such setting; did you mean ratio?"
    assert rules["--set"] == "it is key=value or role.key=value"
    assert rules["--set decoed.tp"] == "no such role; did you mean decode?"
    assert rules["PD_COMPILED"] == "0, 1, true or false"
    assert rules["PD_MODLE"] == "no such setting; did you mean model?"
    assert rules["PD_RUOTER__TP"] == "no such role; did you mean router?"
    assert len(rules) == 9
    for key in rules:
        assert key in str(caught.value)


def test_keys_of_other_services_are_passed_over_only_where_addressed_to_all() -> None:
    """A shared variable of another service is no error; in SPEC, or addressed to this role, it is one."""
    environ = {"PD_HTTP_PORT": "1"}
    assert load(Example, role="decode", environ=environ, also_known={"http_port"}).value == Example()
    with pytest.raises(SettingsError):
        load(Example, role="decode", environ={}, spec="http_port=1", also_known={"http_port"})
    with pytest.raises(SettingsError):
        load(Example, role="decode", environ={"PD_DECODE__HTTP_PORT": "1"}, also_known={"http_port"})


def test_required_values_and_rules_over_several_fields_are_checked() -> None:
    """A missing required value is named once, and a rule of the struct itself becomes a problem too."""
    with pytest.raises(SettingsError) as missing:
        load(Pair, role="decode", environ={})
    assert problems_of(missing) == {"low": "a value is required"}
    with pytest.raises(SettingsError) as bad:
        load(Pair, role="decode", environ={"PD_LOW": "x"})
    assert set(problems_of(bad)) == {"PD_LOW"}
    with pytest.raises(SettingsError) as together:
        load(Pair, role="decode", environ={}, spec="low=11")
    assert problems_of(together) == {"Pair": "low (11) is at most high (10)"}


def test_rules_over_several_fields_are_told_with_everything_else() -> None:
    """Another mistake does not hide them; one in a field that they name does, since they would speak of a default."""
    with pytest.raises(SettingsError) as caught:
        load(Pair, role="decode", environ={"PD_LOW": "11", "PD_FOO": "1"})
    assert set(problems_of(caught)) == {"PD_FOO", "Pair"}
    with pytest.raises(SettingsError) as caught:
        load(Pair, role="decode", environ={"PD_LOW": "11", "PD_HIGH": "many"})
    assert set(problems_of(caught)) == {"PD_HIGH"}


def test_rules_from_outside_are_checked_like_the_structs_own() -> None:
    """They see the whole struct, and are told with everything else, with the rule's name and remedy, where what they name could be read."""

    def rules(value: Example) -> list[SettingsProblem]:
        rule: dict[str, Any] = {"rule": "at most 0.4 with tp above 1", "name": "ratio_of_many", "remedy": "lower ratio"}
        return [SettingsProblem(key="ratio", value=str(value.ratio), **rule)] if value.tp > 1 else []

    assert load(Example, role="x", spec="tp=1", environ={}, rules=rules).value == Example()
    with pytest.raises(SettingsError) as caught:
        load(Example, role="x", spec="tp=2,colour=red", environ={}, rules=rules)
    assert [problem.key for problem in caught.value.problems] == ["colour", "ratio"]
    assert str(caught.value).splitlines()[-2:] == [
        "  ratio = 0.5: at most 0.4 with tp above 1",
        "    ratio_of_many: lower ratio",
    ]
    with pytest.raises(SettingsError) as caught:
        load(Example, role="x", spec="tp=2,ratio=much", environ={}, rules=rules)
    assert len(caught.value.problems) == 1, "a value that could not be read proves nothing"


def test_an_unreadable_config_file_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    """A missing file, broken JSON and JSON of another form are each named."""
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    array = tmp_path / "array.json"
    array.write_text("[]")
    for path in (tmp_path / "missing.json", broken, array):
        with pytest.raises(SettingsError) as caught:
            load(Example, role="decode", environ={}, config_file=path)
        assert str(path) in str(caught.value)


def test_a_spec_is_split_or_refused_with_every_wrong_part() -> None:
    """`key=value` parts split by commas; empty parts, missing values and repeats are named."""
    assert parse_spec(" tp=2, block_size = 16 ") == {"tp": "2", "block_size": "16"}
    assert parse_spec("") == {}
    with pytest.raises(SettingsError) as caught:
        parse_spec("tp=2,,dcp,=1,x=,tp=3")
    assert [problem.value for problem in caught.value.problems] == ["''", "'dcp'", "'=1'", "'x='", "3"]


def test_overrides_reach_every_service_that_knows_the_key() -> None:
    """A bare key goes to all who know it, an addressed one to its role only, and wins there."""
    keys = {"decode": keys_of(Example), "broker": frozenset({"nats_url"})}
    split = split_overrides(["decode.nats_url=b", "nats_url=a", "tp=2"], keys)
    assert split == {"decode": {"nats_url": "b", "tp": "2"}, "broker": {"nats_url": "a"}}
    with pytest.raises(SettingsError) as caught:
        split_overrides(["tpp=1", "broker.tp=1", "brokr.x=1", "x"], keys)
    assert len(caught.value.problems) == 4


def test_the_dump_shows_sources_and_hides_secrets() -> None:
    """Every key has its value and source; tokens and passwords in URLs are not shown, in errors neither."""
    overrides = ["admin_token=hush", "nats_url=nats://user:hush@host:4222"]
    dump = load(Example, role="decode", environ={}, overrides=overrides).dump()
    assert dump["admin_token"] == {"value": "***", "source": "--set"}
    assert dump["nats_url"] == {"value": "nats://***@host:4222", "source": "--set"}
    assert dump["model"] == {"value": "models/tiny", "source": "default"}
    assert "hush" not in str(dump)


def test_the_command_line_carries_spec_overrides_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SPEC --set k=v --config FILE` and the process's environment reach the loader."""
    config = tmp_path / "pd.json"
    config.write_text('{"ratio": 0.25}')
    monkeypatch.setenv("PD_DEVICE", "cuda")
    argv = ["tp=2", "--set", "names=a", "--set", "decode.compiled=1", "--config", str(config)]
    loaded = load_from_arguments(Example, role="decode", argv=argv)
    assert loaded.value == Example(tp=2, ratio=0.25, device="cuda", names=("a",), compiled=True)
