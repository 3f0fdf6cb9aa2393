"""A bucket whose servers elect a leader: nothing of it is told or taken, while every connection stands."""

from __future__ import annotations

from dataclasses import dataclass

from common.bus.faults import NoFaults, Trip
from common.bus.port import BucketConfig


@dataclass
class Leaderless(NoFaults):
    """Faults of a server, until the election is over."""

    config: BucketConfig
    is_electing: bool = True

    def trip(self, subject: str) -> Trip:
        """See `Faults.trip`."""
        return Trip(lost=self.is_electing and subject.startswith(f"$KV.{self.config.name}."))
