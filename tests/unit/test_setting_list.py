"""`pdmesh settings`: every setting of every service, from the structs that declare them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from common.runtime.setting_list import Setting, settings_of
from common.runtime.settings import SettingsError, load
from services.launcher.app import EXIT_CLEAN, run
from services.launcher.core.setting_table import render_settings
from services.launcher.settings import settings_structs


class Kind(StrEnum):
    """Two choices."""

    NEW = "new"
    OLD = "old"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of each form."""

    model: Path
    """Where it is."""
    size: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    """How large."""
    kind: Kind = Kind.OLD
    """Which."""
    ratio: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    eager: bool = True
    names: tuple[str, ...] = ("a", "b")
    nats_url: str = "nats://me:secret@host"


class Odd(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a type that nobody has described."""

    table: dict[str, int] = {}


def test_a_setting_is_told_by_name_kind_default_variable_and_text() -> None:
    """Choices and bounds are in the kind, passwords are hidden, and a text stands with the field above it alone."""
    assert settings_of(Example) == (
        Setting(name="model", kind="path", default=None, variable="PD_MODEL", text="Where it is."),
        Setting(name="size", kind="whole number 1 to 8", default="2", variable="PD_SIZE", text="How large."),
        Setting(name="kind", kind="new | old", default="old", variable="PD_KIND", text="Which."),
        Setting(name="ratio", kind="number > 0", default="0.5", variable="PD_RATIO", text=""),
        Setting(name="eager", kind="true or false", default="true", variable="PD_EAGER", text=""),
        Setting(name="names", kind="several, with commas", default="a,b", variable="PD_NAMES", text=""),
        Setting(name="nats_url", kind="text", default="nats://***@host", variable="PD_NATS_URL", text=""),
    )


def test_a_type_that_cannot_be_described_is_an_error() -> None:
    """Rather than a setting that people read nothing about."""
    with pytest.raises(TypeError, match="cannot be described"):
        settings_of(Odd)


@pytest.mark.parametrize("role", sorted(settings_structs().by_role))
def test_every_setting_of_every_role_has_one_line_and_a_default_that_can_be_given(role: str) -> None:
    """What the list says can be typed back: each default is read as itself."""
    struct: type[Any] = settings_structs().by_role[role]
    settings = settings_of(struct)
    assert [each.name for each in settings] == list(struct.__struct_fields__)
    for each in settings:
        assert each.text.endswith("."), each.name
        assert "\n" not in each.text, each.name
    required = [f"{each.name}=x" for each in settings if each.default is None]
    given = [f"{each.name}={each.default}" for each in settings if each.default]
    bare = load(struct, role=role, overrides=required, environ={})
    assert load(struct, role=role, overrides=[*required, *given], environ={}).value == bare.value


def test_the_variable_is_one_that_is_read() -> None:
    """The name in the list reaches the setting."""
    struct = settings_structs().by_role["broker"]
    (setting,) = [each for each in settings_of(struct) if each.name == "max_ended"]
    assert load(struct, role="broker", environ={setting.variable: "7"}).value.max_ended == 7
    with pytest.raises(SettingsError):
        load(struct, role="broker", environ={f"{setting.variable}X": "7"})


def test_the_table_aligns_and_says_what_is_required_or_empty() -> None:
    """Two lines a setting."""
    settings = [
        Setting(name="model", kind="path", default=None, variable="PD_MODEL", text="Where it is."),
        Setting(name="id", kind="text", default="", variable="PD_ID", text="Its name."),
    ]
    assert render_settings("router", settings).splitlines() == [
        "router",
        "  model  (required)  path  PD_MODEL",
        "      Where it is.",
        "  id     (empty)     text  PD_ID",
        "      Its name.",
    ]


def test_the_command_lists_one_role_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Roles with the same settings stand together; a role that there is not is refused by argparse."""
    assert run(["settings", "decode"]) == EXIT_CLEAN
    one = capsys.readouterr().out
    assert one.startswith("decode\n")
    assert "PD_NUM_BLOCKS" in one
    assert run(["settings"]) == EXIT_CLEAN
    titles = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["router", "broker", "prefill, decode, mixed", "launcher"]
    with pytest.raises(SystemExit) as refused:
        run(["settings", "decoder"])
    assert refused.value.code == 2
