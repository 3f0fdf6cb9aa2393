"""How messages and calls to the store are disturbed: several disturbances at once add up to the worst of each."""

from __future__ import annotations

from typing import Final

import msgspec

from common.bus.faults import SeededFaults
from common.bus.storage import LEASES_CONFIG, LINKS_CONFIG, ROUTERS_CONFIG, WORKERS_CONFIG, handoffs_config
from tests.simulation.plots import FaultKind

_ALL_BUT_RECORDS: Final = (
    *(f"$KV.{config.name}." for config in (LEASES_CONFIG, LINKS_CONFIG, ROUTERS_CONFIG, WORKERS_CONFIG)),
    f"$KV.{handoffs_config(1.0).name}.>",
)
"""Subjects of calls to the store about anything but one handoff's record."""


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities and delays as in `SeededFaults`."""

    loss: float = 0.0
    repeat: float = 0.0
    max_delay_s: float = 0.0
    store_loss: float = 0.0
    answer_loss: float = 0.0
    store_delay_s: float = 0.0
    spares: tuple[str, ...] = ()
    """Prefixes of subjects that it leaves alone."""


def disturbance(kind: FaultKind, severity: float) -> Disturbance:
    """What a fault of a kind, from 0 to 1 as bad as it can be, does to messages and calls."""
    match kind:
        case FaultKind.NOISE:
            return Disturbance(
                loss=0.25 * severity,
                repeat=0.3 * severity,
                max_delay_s=0.3 * severity,
                store_loss=0.1 * severity,
                answer_loss=0.1 * severity,
                store_delay_s=0.2 * severity,
            )
        case FaultKind.LATE:  # just within the time that the broker gives a call
            return Disturbance(loss=0.05 * severity, repeat=0.3, max_delay_s=0.05 + 0.4 * severity)
        case FaultKind.STORE:
            return Disturbance(
                store_loss=0.15 * severity, answer_loss=0.15 * severity, store_delay_s=0.05 + 0.7 * severity
            )
        case FaultKind.WRITES:
            return msgspec.structs.replace(disturbance(FaultKind.STORE, severity), spares=_ALL_BUT_RECORDS)
        case _:
            return Disturbance()


class Disturbances:
    """Those that last now."""

    def __init__(self, faults: SeededFaults) -> None:
        self._faults = faults
        self._lasting: list[Disturbance] = []

    def begin(self, one: Disturbance) -> None:
        """From now on, beside the others."""
        self._lasting.append(one)
        self._apply()

    def end(self, one: Disturbance) -> None:
        """The others go on."""
        self._lasting.remove(one)
        self._apply()

    def _apply(self) -> None:
        for field in Disturbance.__struct_fields__:
            if field != "spares":
                setattr(self._faults, field, max((getattr(each, field) for each in self._lasting), default=0.0))
        # What one of those that disturb the store does not spare is not spared.
        of_store = [each.spares for each in self._lasting if each.store_delay_s]
        self._faults.protected = of_store[0] if of_store and all(of_store) else ()
