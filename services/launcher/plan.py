"""What a mesh will consist of: every service with its settings, all of it checked before anything starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from common.bus.nats_url import servers_of
from common.runtime.settings import Loaded, SettingsError, SettingsProblem, load, parse_spec, split_overrides
from common.worker.configuration import judge_worker, problems_of
from common.worker.core.compatibility import Verdict
from common.worker.core.role_settings import misplaced
from common.worker.settings import WorkerSettings
from contracts.errors import InvalidValueError
from contracts.ids import check_token
from contracts.workers import WorkerRole
from services.launcher.core.pair_drafts import lonely_drafts
from services.launcher.core.presets import Preset
from services.launcher.settings import LauncherSettings, SettingsStructs

T = TypeVar("T")

_PAIRED_ROLES: Final = ("prefill", "decode")
WORKER_ROLES: Final = ("prefill", "decode", "mixed")
_COPIED: Final = "a cache is copied, not converted"
_EQUAL_IN_A_PAIR: Final = {"block_size": _COPIED, "dtype": _COPIED, "transport": "both ends move bytes in the same way"}
_LISTENS: Final = (("admin_port", "admin_host"), ("port", "host"))
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
_OURS: Final = "launcher"
_LATER: Final = "decided at start"
_SHARED_PLACES: Final = ("--", "PD_", "config file")


class MeshRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for, as text. `workers` holds (role, SPEC) in the order given; a preset adds those of roles that none is given of."""

    model: str | None
    workers: tuple[tuple[str, str], ...]
    port: int | None = None
    overrides: tuple[str, ...] = ()
    config_file: Path | None = None
    preset: Preset | None = None
    restart: bool = True

    @property
    def all_workers(self) -> tuple[tuple[str, str], ...]:
        """Those given, in that order; with a preset also its own, all in the order of a request's way."""
        if self.preset is None:
            return self.workers
        given = {role for role, _ in self.workers}
        added = ((role, "") for role in self.preset.roles if role not in given)
        return tuple(sorted((*self.workers, *added), key=lambda worker: WORKER_ROLES.index(worker[0])))


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One service to start. `name` is a worker's id, else the role; a broker that stands by has a number after it.

    `verdict` is what is said of a worker's settings beside that they are legal.
    """

    name: str
    role: str
    settings: Loaded[Any]
    verdict: Verdict | None = None

    def dump(self) -> dict[str, dict[str, Any]]:
        """Every setting with its value and its source, and beside them its effect where that is another one."""
        shown = self.settings.dump()
        for each in () if self.verdict is None else self.verdict.resolved:
            shown[each.key] |= {"effective": each.effective, "reason": each.reason}
        return shown


class MeshPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh that may be started: every setting is known and legal."""

    own: Loaded[LauncherSettings]
    brokers: tuple[ServicePlan, ...]
    router: ServicePlan
    workers: tuple[ServicePlan, ...]

    @property
    def launcher(self) -> LauncherSettings:
        """The launcher's own settings."""
        return self.own.value

    @property
    def services(self) -> tuple[ServicePlan, ...]:
        """All services in the order of their start."""
        return (*self.brokers, *self.workers, self.router)

    def dump(self) -> str:
        """The effective settings of the launcher and of every service with where each came from, as JSON.

        What only the start can decide is said to be so. Secrets are hidden.
        """
        own = self.own.dump()
        settings = {"launcher": own}
        later = {"value": _LATER, "source": _OURS}
        for service in self.services:
            shown = service.dump()
            shown["nats_url"] = own["nats_url"] if self.launcher.nats_url else later
            if makes_transport_dir(service):
                shown["transport_dir"] = later
            settings[service.name] = shown
        return json.dumps(settings, indent=2, default=_plain)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with what was asked for. `service` is whose setting it is; empty: it concerns the whole mesh."""

    service: str
    problem: SettingsProblem


class MeshCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say of a request. Without findings there is a `plan`. `verdicts` are of workers whose settings could be read."""

    findings: tuple[Finding, ...]
    workers: tuple[str, ...]
    verdicts: Mapping[str, Verdict]
    plan: MeshPlan | None


def check_mesh(request: MeshRequest, structs: SettingsStructs, environ: Mapping[str, str]) -> MeshCheck:
    """Check the whole request, and say all that there is to say."""
    return _Planner(request, structs, environ).check()


def make_plan(request: MeshRequest, structs: SettingsStructs, environ: Mapping[str, str]) -> MeshPlan:
    """Check the whole request. Raises SettingsError that lists everything that is wrong with it."""
    check = check_mesh(request, structs, environ)
    if check.plan is None:
        raise SettingsError([_named(finding) for finding in check.findings])
    return check.plan


def makes_transport_dir(service: ServicePlan) -> bool:
    """Whether the start gives the service a folder for its sockets, because nobody chose one."""
    return service.settings.sources.get("transport_dir") == "default"


def settings_json(settings: msgspec.Struct, **replaced: Any) -> bytes:
    """One service's settings as the content of a config file for it. `replaced` are the values of this start."""
    return msgspec.json.encode(msgspec.structs.replace(settings, **replaced), enc_hook=_plain)


class _Planner:
    def __init__(self, request: MeshRequest, structs: SettingsStructs, environ: Mapping[str, str]) -> None:
        self._request = request
        self._structs = structs.by_role
        self._known = structs.all_keys
        self._environ = environ
        self._findings: list[Finding] = []
        self._verdicts: dict[str, Verdict] = {}
        self._paired: dict[str, WorkerSettings] = {}
        self._overrides = list(request.overrides)
        self._origins: dict[str, str] = {}
        self._numbered: set[str] = set()
        if request.model is not None:
            self._add(f"model={request.model}", "--model")
        if request.port is not None:
            self._add(f"router.port={request.port}", "--port")
        if not request.restart:
            self._add("launcher.restarts_per_minute=0", "--no-restart")

    def check(self) -> MeshCheck:
        self._collect(
            lambda: split_overrides(self._overrides, {r: s.__struct_fields__ for r, s in self._structs.items()})
        )
        specs = self._name_workers()
        launcher = self._load("launcher", "launcher")
        if launcher is not None and launcher.settings.value.nats_url:
            self._collect(partial(servers_of, launcher.settings.value.nats_url))
        brokers = self._load_brokers(1 if launcher is None else launcher.settings.value.brokers)
        expected = ",".join(name for name, _, _ in specs if _is_token(name))
        if expected:
            self._add(f"router.expected_workers={expected}", _OURS)
        router = self._load("router", "router")
        workers = [self._load(role, name, spec) for name, role, spec in specs]
        known = self._with_cautions([worker for worker in workers if worker is not None])
        self._check_models([router, *workers])
        self._check_pairs()
        self._check_times(brokers, router)
        self._check_replicas(launcher, [service for service in (*brokers, router, *known) if service is not None])
        self._check_ports([service for service in (*brokers, router, *known) if service is not None])
        plan = None
        if not self._findings and launcher is not None and router is not None:
            plan = MeshPlan(own=launcher.settings, brokers=tuple(brokers), router=router, workers=tuple(known))
        return MeshCheck(
            findings=self._distinct_findings(),
            workers=tuple(name for name, _, _ in specs),
            verdicts=self._verdicts,
            plan=plan,
        )

    def _add(self, override: str, origin: str) -> None:
        """Add what reaches services as `--set` does, and came from elsewhere."""
        self._overrides.append(override)
        self._origins[override] = origin

    def _name_workers(self) -> list[tuple[str, str, str]]:
        """Name, role and SPEC of each worker; SPEC's `id` becomes its `worker_id`, else the role and a number do."""
        named: list[tuple[str, str, str]] = []
        counts: Counter[str] = Counter()
        for role, spec in self._request.all_workers:
            values = dict(self._collect(partial(parse_spec, spec), place=f"--{role}") or {})
            if "id" in values and "worker_id" in values:
                self._problem(f"--{role} id", values["id"], "either id or worker_id")
            given = values.pop("id", None) or values.pop("worker_id", None)
            name = given or f"{role}-{counts[role]}"
            counts[role] += given is None
            if given is None:
                self._numbered.add(name)
            values["worker_id"] = name
            named.append((name, role, ",".join(f"{key}={value}" for key, value in values.items())))
        for name, count in Counter(name for name, _, _ in named).items():
            if count > 1:
                self._problem("worker_id", name, f"ids differ; this one is given to {count} workers")
        roles = {role for role, _ in self._request.all_workers}
        if "mixed" not in roles and not {"prefill", "decode"} <= roles:
            shown = ", ".join(sorted(roles)) or "(none)"
            self._problem("workers", shown, "at least one --prefill and one --decode, or one --mixed")
        return named

    def _load_brokers(self, num_brokers: int) -> list[ServicePlan]:
        """The one broker, and those that stand by for it: alike but for their ids."""
        first = self._load("broker", "broker")
        if first is None:
            return []
        found = [first]
        for number in range(1, num_brokers):
            loaded: Loaded[Any] = first.settings
            broker_id = f"{loaded.value.broker_id.removesuffix('-0')}-{number}"
            value = msgspec.structs.replace(loaded.value, broker_id=broker_id)
            settings = msgspec.structs.replace(loaded, value=value, sources=loaded.sources | {"broker_id": _OURS})
            found.append(ServicePlan(name=f"broker-{number}", role="broker", settings=settings))
        return found

    def _load(self, role: str, name: str, spec: str = "") -> ServicePlan | None:
        preset = self._request.preset
        loaded = self._collect(
            lambda: load(
                self._structs[role],
                role=role,
                spec=spec,
                overrides=self._overrides,
                config_file=self._request.config_file,
                environ=self._environ,
                also_known=self._known,
                origins=self._origins,
                preset=None if preset is None else (preset.name, preset.settings),
                rules=partial(self._judge, name, WorkerRole(role)) if role in WORKER_ROLES else None,
                misplaced=misplaced(WorkerRole(role)) if role in WORKER_ROLES else None,
            ),
            place=name,
        )
        if loaded is None:
            return None
        if name in self._numbered:
            loaded = msgspec.structs.replace(loaded, sources=loaded.sources | {"worker_id": _OURS})
        return ServicePlan(name=name, role=role, settings=loaded, verdict=self._verdicts.get(name))

    def _judge(self, name: str, role: WorkerRole, settings: WorkerSettings) -> list[SettingsProblem]:
        verdict = self._verdicts[name] = judge_worker(settings, role)
        if role is not WorkerRole.MIXED:
            self._paired[name] = settings
        return problems_of(verdict)

    def _with_cautions(self, workers: list[ServicePlan]) -> list[ServicePlan]:
        """The workers with what is to be said of some because of the others."""
        sides: list[dict[str, WorkerSettings]] = [
            {worker.name: worker.settings.value for worker in workers if worker.role == role} for role in _PAIRED_ROLES
        ]
        for name, caution in lonely_drafts(*sides):
            verdict = self._verdicts[name]
            self._verdicts[name] = msgspec.structs.replace(verdict, cautions=(*verdict.cautions, caution))
        return [msgspec.structs.replace(worker, verdict=self._verdicts.get(worker.name)) for worker in workers]

    def _check_models(self, services: list[ServicePlan | None]) -> None:
        models = {str(service.settings.value.model) for service in services if service is not None}
        models |= set() if self._request.model is None else {self._request.model}
        for model in sorted(models):
            if not (Path(model) / "config.json").is_file():
                self._problem("--model", model, "a directory with a checkpoint: config.json is not there")

    def _check_times(self, brokers: Sequence[ServicePlan], router: ServicePlan | None) -> None:
        """A broker refuses what would outlive its record."""
        if router is None or not brokers:
            return
        lasts_s, kept_s = router.settings.value.request_timeout_s, brokers[0].settings.value.record_ttl_s
        if lasts_s > kept_s:
            rule = f"at most broker.record_ttl_s, {kept_s:g}: no request outlives its record; change one of the two"
            self._problem("router.request_timeout_s", f"{lasts_s:g}", rule)

    def _check_replicas(self, launcher: ServicePlan | None, services: list[ServicePlan]) -> None:
        """A server of the launcher's own is alone, and what is kept is kept alike for all."""
        counts = {service.name: getattr(service.settings.value, "nats_replicas", 1) for service in services}
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        if len(set(counts.values())) > 1:
            self._problem("nats_replicas", shown, "the same for every service")
        elif launcher is not None and not launcher.settings.value.nats_url and set(counts.values()) - {1}:
            self._problem("nats_replicas", shown, "1 without nats_url: the launcher's own server is alone")

    def _check_ports(self, services: list[ServicePlan]) -> None:
        """Of services that would listen at the same fixed port of this machine only one could start."""
        listeners: dict[int, list[tuple[str, str]]] = {}
        for service in services:
            for port_key, host_key in _LISTENS:
                port = getattr(service.settings.value, port_key, 0)
                if port:
                    host = getattr(service.settings.value, host_key)
                    listeners.setdefault(port, []).append((f"{service.name} {port_key}", host))
        for port, ends in listeners.items():
            clashing = [
                name for place, (name, host) in enumerate(ends) if _meets(host, ends[:place] + ends[place + 1 :])
            ]
            if clashing:
                self._problem(", ".join(clashing), str(port), "a port for each of them, or 0 for a free one")

    def _check_pairs(self) -> None:
        """Workers that could never be linked are refused before anything starts."""
        for key, reason in _EQUAL_IN_A_PAIR.items():
            values = {name: getattr(settings, key) for name, settings in self._paired.items()}
            if len(set(values.values())) > 1:
                shown = ", ".join(f"{name} {value}" for name, value in values.items())
                self._problem(key, shown, f"the same on every prefill and decode worker: {reason}")

    def _collect(self, call: Callable[[], T], place: str = "") -> T | None:
        try:
            return call()
        except SettingsError as error:
            for problem in error.problems:
                everybodys = not place or problem.key.startswith((*_SHARED_PLACES, str(self._request.config_file)))
                self._findings.append(Finding(service="" if everybodys else place, problem=problem))
            return None

    def _problem(self, key: str, value: str, rule: str) -> None:
        self._findings.append(Finding(service="", problem=SettingsProblem(key=key, value=value, rule=rule)))

    def _distinct_findings(self) -> tuple[Finding, ...]:
        """What is set for everybody is refused by everybody, in slightly different words: say it once, in the most helpful ones.

        Rules of different names are different refusals: whoever mends the one would meet the other next.
        """
        found: dict[tuple[str, str, str, str], Finding] = {}
        for each in self._findings:
            problem = each.problem
            place = each.service, problem.key, problem.value, problem.name
            known = found.setdefault(place, each)
            if known.problem.rule in problem.rule:  # the same, with what may have been meant
                found[place] = each
        return tuple(found.values())


def _named(finding: Finding) -> SettingsProblem:
    """The problem with its service's name before the key."""
    problem = finding.problem
    return msgspec.structs.replace(problem, key=f"{finding.service}: {problem.key}") if finding.service else problem


def _meets(host: str, others: list[tuple[str, str]]) -> bool:
    """Whether one of the others listens at the same address, or one of the two at all addresses."""
    return any(host == other or {host, other} & _EVERYWHERE for _, other in others)


def _is_token(name: str) -> bool:
    try:
        check_token("worker_id", name)
    except InvalidValueError:
        return False
    return True


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a setting")
