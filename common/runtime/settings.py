"""Settings: read once at the start, from six places, into one frozen struct a service.

Precedence, highest first: SPEC (`tp=2,block_size=16`), `--set key=value` (`--set role.key=value` for one role only),
`PD_KEY` variables (`PD_ROLE__KEY` for one role only), the JSON config file (`{"key": ..., "role": {"key": ...}}`), a preset of the
same form that whoever reads the settings brings, the struct's defaults. Within one place, what is addressed to one role wins over what
is addressed to all.

A service declares a frozen `msgspec.Struct`; types and `msgspec.Meta` constraints are the rules. All bad values and
unknown keys are reported together. This is the only module that reads the environment.
"""

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from common.runtime.setting_values import read_json, read_text, shown
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError

T = TypeVar("T", bound=msgspec.Struct)

ROLES: Final = ("router", "broker", "prefill", "decode", "mixed", "launcher")
"""Names that may stand before the key of `--set`, in `PD_ROLE__KEY` and as sections of the config file."""

ENVIRONMENT_PREFIX: Final = "PD_"
CONFIG_VARIABLE: Final = "PD_CONFIG"
"""Names the config file, unless the command line does."""


class SettingsProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One bad setting."""

    key: str
    """As it was spelled: `tp`, `--set router.port`, `PD_PORT`."""
    value: str
    rule: str
    name: str = ""
    """Of the rule, where it has one."""
    remedy: str = ""
    """What to change, where there is more to say than the rule does."""
    addressed_only: bool = False
    """Whether it holds only of what is addressed to this service or its role: set for everybody, the setting is passed over here."""

    @property
    def text(self) -> str:
        """All of it, in one or two lines."""
        first = f"{self.key} = {self.value}: {self.rule}"
        return f"{first}\n    {self.name}: {self.remedy}" if self.name else first


Misplaced: TypeAlias = Callable[[str, str, str], SettingsProblem | None]
"""What is wrong with giving a key to this service in particular: asked with the key, its label and its value."""


class SettingsError(PdmeshError):
    """Everything that is wrong with the settings, at once. A process that meets it exits with status 2."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, problems: Sequence[SettingsProblem]) -> None:
        lines = [f"  {problem.text}" for problem in problems]
        super().__init__("\n".join(["settings are not valid:", *lines]))
        self.problems = tuple(problems)


class Loaded(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Settings with the place that each value came from."""

    value: T
    sources: dict[str, str]

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return every key with its `value` (secrets and URL passwords hidden) and its `source`."""
        return {
            key: {"value": shown(key, getattr(self.value, key)), "source": source}
            for key, source in self.sources.items()
        }


def environment() -> dict[str, str]:
    """Return a copy of the process's environment."""
    return dict(os.environ)  # noqa: TID251 - this module owns the environment


def keys_of(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of a service's settings."""
    return frozenset(field.name for field in msgspec.structs.fields(struct))


def parse_spec(spec: str) -> dict[str, str]:
    """Split `tp=2,block_size=16`. Empty text is no settings. Raises SettingsError naming each part that is wrong."""
    values: dict[str, str] = {}
    problems: list[SettingsProblem] = []
    for part in spec.split(",") if spec.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            problems.append(SettingsProblem(key="SPEC", value=repr(part), rule="each part is key=value"))
        elif key in values:
            problems.append(SettingsProblem(key=key, value=value, rule=f"given twice in {spec!r}"))
        else:
            values[key] = value
    if problems:
        raise SettingsError(problems)
    return values


def load(
    struct: type[T],
    *,
    role: str,
    spec: str = "",
    overrides: Sequence[str] = (),
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    also_known: Collection[str] = (),
    origins: Mapping[str, str] | None = None,
    rules: Callable[[T], Sequence[SettingsProblem]] | None = None,
    misplaced: Misplaced | None = None,
    preset: tuple[str, Mapping[str, Any]] | None = None,
) -> Loaded[T]:
    """Read the settings of one service. `preset` is a name with what a config file of that content would say.

    `overrides` are the texts of `--set`; `origins` names another source for those among them that came from elsewhere
    (`{"router.port=80": "--port"}`). `environ` is the process's own environment unless given. Keys in `also_known`
    belong to other services and are passed over where they are addressed to all; keys addressed to another role always
    are. `misplaced` is asked of each key that is addressed to this service or its role alone, with its label and value, and may refuse
    it. Raises SettingsError that lists every problem; rules over several settings, the struct's own and then those of `rules`,
    are checked where each of these could be read and no required setting is missing. What one says `addressed_only` is left out
    where the value came from a place that is for everybody.
    """
    environ = environment() if environ is None else environ
    reader = _Reader(struct, role, also_known, misplaced)
    if preset is not None:
        reader.read_content(preset[1], f"preset {preset[0]}")
    reader.read_config(config_file or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None))
    reader.read_environment(environ)
    reader.read_overrides(overrides, origins or {})
    reader.read_spec(spec)
    return reader.finish(rules)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a service's command line the arguments that `load_from_arguments` reads."""
    parser.add_argument("spec", nargs="?", default="", metavar="SPEC", help="settings as key=value,key=value")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[ROLE.]KEY=VALUE",
        dest="overrides",
        help="a setting (pdmesh settings lists them); may be repeated",
    )
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="settings as JSON")


def load_from_arguments(
    struct: type[T],
    *,
    role: str,
    argv: Sequence[str],
    rules: Callable[[T], Sequence[SettingsProblem]] | None = None,
    misplaced: Misplaced | None = None,
) -> Loaded[T]:
    """Read the settings of one service from its command line and its environment. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return load(
        struct,
        role=role,
        spec=arguments.spec,
        overrides=arguments.overrides,
        config_file=arguments.config,
        rules=rules,
        misplaced=misplaced,
    )


def split_overrides(overrides: Iterable[str], keys: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Say which service gets which `--set`: role -> key -> text. `keys` holds the keys that each role knows.

    A bare key reaches every role that knows it. Raises SettingsError for what is not `[role.]key=value`, and for keys
    that nobody knows.
    """
    chosen: dict[str, dict[str, str]] = {role: {} for role in keys}
    addressed: dict[str, dict[str, str]] = {role: {} for role in keys}
    problems: list[SettingsProblem] = []
    everything = sorted({key for known in keys.values() for key in known})
    for text in overrides:
        name, equals, value = text.partition("=")
        role, dot, key = name.strip().rpartition(".")
        if not equals or not key:
            problems.append(_bad_override(text))
            continue
        known = keys.get(role, ()) if dot else everything
        if dot and role not in keys:
            problems.append(_unknown(f"--set {name}", value, role, keys, what="role"))
        elif key not in known:
            problems.append(_unknown(f"--set {name}", value, key, known))
        elif dot:
            addressed[role][key] = value
        else:
            for each, theirs in keys.items():
                if key in theirs:
                    chosen[each][key] = value
    if problems:
        raise SettingsError(problems)
    return {role: chosen[role] | addressed[role] for role in keys}


class _Reader:
    """Collects values from the lowest precedence to the highest, and problems from all of them."""

    def __init__(self, struct: type[Any], role: str, also_known: Collection[str], misplaced: Misplaced | None) -> None:
        self._struct = struct
        self._role = role
        self._misplaced = misplaced
        self._fields = {field.name: field for field in msgspec.structs.fields(struct)}
        self._elsewhere = frozenset(also_known)
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = dict.fromkeys(self._fields, "default")
        self._problems: list[SettingsProblem] = []
        self._broken: set[str] = set()
        self._addressed: set[str] = set()

    def read_config(self, path: Path | None) -> None:
        if path is None:
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._problem("config file", str(path), f"a readable JSON file ({error})")
            return
        if not isinstance(content, dict):
            self._problem("config file", str(path), "a JSON object")
            return
        self.read_content(content, str(path))

    def read_content(self, content: Mapping[str, Any], place: str) -> None:
        """Read what a JSON object holds; `place` is where it stands."""
        sections = {key: value for key, value in content.items() if key in ROLES and isinstance(value, dict)}
        for key, value in content.items():
            if key not in sections:
                self._take(key, value, source=place, label=f"{place}: {key}", text=False, shared=True)
        for key, value in sections.get(self._role, {}).items():
            self._take(key, value, source=place, label=f"{place}: {self._role}.{key}", text=False, shared=False)

    def read_environment(self, environ: Mapping[str, str]) -> None:
        own: list[tuple[str, str, str]] = []
        for name in sorted(environ):
            if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_VARIABLE:
                continue
            role, addressed, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().rpartition("__")
            if not addressed:
                self._take(key, environ[name], source=name, label=name, text=True, shared=True)
            elif role == self._role:
                own.append((name, key, environ[name]))
            elif role not in ROLES:
                self._problems.append(_unknown(name, environ[name], role, ROLES, what="role"))
        for name, key, value in own:
            self._take(key, value, source=name, label=name, text=True, shared=False)

    def read_overrides(self, overrides: Sequence[str], origins: Mapping[str, str]) -> None:
        own: list[tuple[str, str, str]] = []
        for text in overrides:
            name, equals, value = text.partition("=")
            role, dot, key = name.strip().rpartition(".")
            source = origins.get(text, "--set")
            if not equals or not key:
                self._problems.append(_bad_override(text))
            elif not dot:
                self._take(key, value, source=source, label=f"--set {key}", text=True, shared=True)
            elif role == self._role:
                own.append((key, value, source))
            elif role not in ROLES:
                self._problems.append(_unknown(f"--set {name}", value, role, ROLES, what="role"))
        for key, value, source in own:
            self._take(key, value, source=source, label=f"--set {self._role}.{key}", text=True, shared=False)

    def read_spec(self, spec: str) -> None:
        try:
            values = parse_spec(spec)
        except SettingsError as error:
            self._problems += error.problems
            return
        for key, value in values.items():
            self._take(key, value, source="SPEC", label=key, text=True, shared=False)

    def finish(self, rules: Callable[[Any], Sequence[SettingsProblem]] | None) -> Loaded[Any]:
        missing = {name for name, field in self._fields.items() if field.required and name not in self._values}
        for name in sorted(missing - self._broken, key=list(self._fields).index):
            self._problem(name, "(not given)", "a value is required")
        value = None if missing else self._build(rules)
        if value is None or self._problems:
            raise SettingsError(self._problems)
        return Loaded(value=value, sources=self._sources)

    def _build(self, rules: Callable[[Any], Sequence[SettingsProblem]] | None) -> Any:
        """The struct, or None with what its own rules say of the values that could be read.

        A value that could not be read stands at a lower place's or its default, so a rule that names it proves nothing.
        """
        try:
            value = self._struct(**self._values)
            found = () if rules is None else rules(value)
            broken = [each for each in found if each.key in self._addressed or not each.addressed_only]
            if not broken:
                return value
        except SettingsError as error:
            broken = list(error.problems)
        except InvalidValueError as error:
            shown_value = str(shown(error.field, error.value))
            broken = [SettingsProblem(key=error.field, value=shown_value, rule=error.rule_text)]
        except ValueError as error:
            broken = [SettingsProblem(key=self._struct.__name__, value="(together)", rule=str(error))]
        self._problems += [each for each in broken if not _names(self._broken, each)]
        return None

    def _take(self, key: str, value: Any, *, source: str, label: str, text: bool, shared: bool) -> None:
        field = self._fields.get(key)
        if field is None:
            if not (shared and key in self._elsewhere):
                self._problems.append(_unknown(label, shown(key, value), key, self._fields))
            return
        refused = None if shared or self._misplaced is None else self._misplaced(key, label, str(shown(key, value)))
        if refused is not None:
            self._broken.add(key)
            self._problems.append(refused)
            return
        try:
            self._values[key] = read_text(value, field.type) if text else read_json(value, field.type)
        except ValueError as error:
            self._broken.add(key)
            self._problem(label, str(shown(key, value)), str(error))
        else:
            self._sources[key] = source
            (self._addressed.discard if shared else self._addressed.add)(key)

    def _problem(self, key: str, value: str, rule: str) -> None:
        self._problems.append(SettingsProblem(key=key, value=value, rule=rule))


def _unknown(label: str, value: Any, key: str, known: Iterable[str], what: str = "setting") -> SettingsProblem:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return SettingsProblem(key=label, value=str(value), rule=f"no such {what}{hint}")


def _names(keys: Collection[str], problem: SettingsProblem) -> bool:
    return not set(keys).isdisjoint(re.findall(r"\w+", f"{problem.key} {problem.rule}"))


def _bad_override(text: str) -> SettingsProblem:
    return SettingsProblem(key="--set", value=repr(text), rule="it is key=value or role.key=value")
