"""What the launcher itself can be told, beside what it passes on to the services."""

from __future__ import annotations

import pkgutil
from typing import Annotated, Any, Final

import msgspec

from common.runtime.setting_types import Count, Port, Seconds
from common.runtime.settings import keys_of
from common.worker.settings import WorkerSettings

_SERVICES: Final = {
    "router": "services.router.settings:RouterSettings",
    "broker": "services.broker.settings:BrokerSettings",
}


class LauncherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `pdmesh up` and `pdmesh demo`."""

    nats_url: str = ""
    """The NATS server to use; empty: one of the launcher's own is started."""
    nats_port: Port = 0
    """Port of the launcher's own server; 0: a free one."""
    log_dir: str = ""
    """Where logs stay; empty: they go with the mesh, unless it failed."""
    start_timeout_s: Seconds = 300.0
    """How long the mesh may take until it is ready."""
    restarts_per_minute: Annotated[int, msgspec.Meta(ge=0)] = 5
    """How often in a minute a service that died is started again before the mesh ends; 0: its first death ends the mesh."""
    brokers: Count = 1
    """Brokers to start: one leads, the others stand by."""


class SettingsStructs(msgspec.Struct, frozen=True, kw_only=True):
    """The settings struct of each role: what is checked before anything starts."""

    by_role: dict[str, type[Any]]

    @property
    def all_keys(self) -> frozenset[str]:
        """Every key that some role knows."""
        return frozenset().union(*(keys_of(struct) for struct in self.by_role.values()))


def settings_structs() -> SettingsStructs:
    """Find the settings struct of every role.

    Services do not import each other, so the two that keep their struct to themselves are found by name. A struct is data
    and loads neither torch nor the service's own code.
    """
    by_role: dict[str, type[Any]] = {role: pkgutil.resolve_name(name) for role, name in _SERVICES.items()}
    by_role |= dict.fromkeys(("prefill", "decode", "mixed"), WorkerSettings)
    by_role["launcher"] = LauncherSettings
    return SettingsStructs(by_role=by_role)
