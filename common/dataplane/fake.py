"""A data plane in memory, with the semantics of the real ones, and faults that a test plants in its transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from common.dataplane.checks import check_grant, check_runs
from common.dataplane.fake_network import TRANSPORT, FakeNetwork, FakeRegion, Fault, FaultKind, address_of
from common.dataplane.port import Capabilities, DataPlaneError, Outcome, Region, TransferResult, WriteGrant
from common.dataplane.refusal_counts import RefusalCounts
from common.dataplane.waiting import STOPPED
from common.layout.run import Run
from contracts.dataplane import DESCRIPTOR_VERSION, RegionDescriptor
from contracts.errors import InvalidValueError

_STALE: Final = "the grant's generation is no longer the one in its cells"


class FakeRemoteRegion:
    """A region of another endpoint. See `port.RemoteRegion`."""

    def __init__(self, network: FakeNetwork, region: FakeRegion, now: Callable[[], float]) -> None:
        """Use `FakeDataPlane.connect`."""
        self.descriptor: Final = region.descriptor
        self._network = network
        self._region = region
        self._now = now
        self._closed = False

    @property
    def peer_alive(self) -> bool:
        """False once the owner has closed the region, or this end is closed."""
        return self._region.alive and not self._closed

    def write(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from `local` into this region, as the next planted fault would have it."""
        here = _own(local)
        if refused := self._refusal(runs, here, grant):
            return _failed(refused)
        fault = self._network.faults.popleft() if self._network.faults else None
        region = self._region
        region.enter(grant.lock_cell)
        if refused := self._stop_reason(grant, deadline):
            region.leave(grant.lock_cell)
            return _failed(refused)
        if fault is not None and fault.kind is FaultKind.INDETERMINATE:

            def land() -> None:
                _copy(runs, here.data, region.data, to_remote=True)
                region.leave(grant.lock_cell)

            self._network.late.append(land)
            return TransferResult(outcome=Outcome.INDETERMINATE, reason="planted: the peer does not say")
        try:
            return self._perform(fault, runs, here, grant, deadline, to_remote=True)
        finally:
            region.leave(grant.lock_cell)

    def read(self, runs: Sequence[Run], local: Region, grant: WriteGrant, deadline: float) -> TransferResult:
        """Copy `runs` from this region into `local`; a read takes no lock, and looks at the generation again afterwards."""
        here = _own(local)
        if refused := self._refusal(runs, here, grant) or self._stop_reason(grant, deadline):
            return _failed(refused)
        fault = self._network.faults.popleft() if self._network.faults else None
        if fault is not None and fault.kind is FaultKind.INDETERMINATE:

            def land() -> None:
                _copy(runs, here.data, self._region.data, to_remote=False)

            self._network.late.append(land)
            return TransferResult(outcome=Outcome.INDETERMINATE, reason="planted: the peer does not say")
        return self._perform(fault, runs, here, grant, deadline, to_remote=False)

    def close(self) -> None:
        """Let go of the region. Idempotent."""
        self._closed = True

    def _perform(
        self,
        fault: Fault | None,
        runs: Sequence[Run],
        local: FakeRegion,
        grant: WriteGrant,
        deadline: float,
        *,
        to_remote: bool,
    ) -> TransferResult:
        kind = None if fault is None else fault.kind
        if fault is not None and kind is FaultKind.HOLD:
            fault.entered.set()
            if not fault.gate.wait(max(0.0, deadline - self._now())):
                return _failed("the deadline has passed")
        if kind is FaultKind.FAIL_BEFORE:
            return _failed("planted: before the copy")
        nbytes = _copy(runs, local.data, self._region.data, to_remote=to_remote)
        if kind is FaultKind.CORRUPT:
            run = next(run for run in runs if run.nbytes)
            target, offset = (self._region.data, run.remote_offset) if to_remote else (local.data, run.local_offset)
            target[offset] ^= 0xFF
        if kind is FaultKind.FAIL_AFTER:
            return _failed("planted: after the copy", nbytes)
        if not self._region.holds(grant):
            return _failed(_STALE, nbytes)
        if to_remote and not self.peer_alive:
            return _failed("the peer has closed the region, or this end is closed", nbytes)
        return TransferResult(outcome=Outcome.DONE, nbytes=nbytes)

    def _refusal(self, runs: Sequence[Run], local: FakeRegion, grant: WriteGrant) -> str:
        region = self._region
        return check_grant(grant, len(region.cells)) or check_runs(runs, len(local.data), len(region.data))

    def _stop_reason(self, grant: WriteGrant, deadline: float) -> str:
        if not self._region.holds(grant):
            return _STALE
        if not self.peer_alive:
            return "the peer has closed the region, or this end is closed"
        return "the deadline has passed" if self._now() >= deadline else ""


class FakeDataPlane:
    """One endpoint on a `FakeNetwork`. See `port.DataPlane`. Closing it is the death of the process."""

    capabilities: Final = Capabilities(
        read=True,
        write=True,
        external_memory=False,
        cancel=False,
        needs_remote_progress=False,
        revocable=True,
        stops_writers=False,
        checks_secret=True,
        max_batch=1 << 20,
        device_types=("cpu",),
    )

    def __init__(self, network: FakeNetwork, *, peer_id: str, incarnation: str, now: Callable[[], float]) -> None:
        """Join `network`; deadlines are on `now`'s clock."""
        self.refusals: Final = RefusalCounts()
        self.network: Final = network
        self.peer_id: Final = peer_id
        self.incarnation: Final = incarnation
        self.now: Final = now
        self._regions: list[FakeRegion] = []
        self._closed = False

    def allocate(self, nbytes: int, num_cells: int) -> FakeRegion:
        """Allocate a region."""
        if self._closed:
            raise DataPlaneError("this data plane is closed")
        descriptor = RegionDescriptor(
            transport=TRANSPORT,
            peer_id=self.peer_id,
            incarnation=self.incarnation,
            region_id=f"region-{len(self._regions)}",
            generation=next(self.network.generations),
            base=0,
            length=nbytes,
            num_cells=num_cells,
            opaque="",
        )
        region = FakeRegion(self.network, descriptor, now=self.now)
        self._regions.append(region)
        return region

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> FakeRemoteRegion:
        """Reach a region of another endpoint. It never waits."""
        if stop is not None and stop.is_set():
            raise DataPlaneError(STOPPED)
        if descriptor.transport != TRANSPORT or descriptor.version != DESCRIPTOR_VERSION:
            raise DataPlaneError(f"descriptor: {descriptor.transport} version {descriptor.version} cannot be reached")
        region = self.network.regions.get(address_of(descriptor))
        if region is None or region.descriptor.generation != descriptor.generation or self.now() >= deadline:
            raise DataPlaneError(f"no region {descriptor.region_id!r} of incarnation {descriptor.incarnation!r} here")
        return FakeRemoteRegion(self.network, region, self.now)

    def close(self) -> None:
        """Close every region: peers see the death. Idempotent."""
        self._closed = True
        for region in self._regions:
            region.close()


def _own(region: Region) -> FakeRegion:
    if not isinstance(region, FakeRegion):
        raise InvalidValueError(field="local", value=type(region).__name__, rule="a region of a fake data plane")
    return region


def _copy(runs: Sequence[Run], local: memoryview, remote: memoryview, *, to_remote: bool) -> int:
    for run in runs:
        for item in range(run.count):
            here = slice(
                run.local_offset + item * run.local_stride, run.local_offset + item * run.local_stride + run.length
            )
            there = slice(
                run.remote_offset + item * run.remote_stride, run.remote_offset + item * run.remote_stride + run.length
            )
            if to_remote:
                remote[there] = local[here]
            else:
                local[here] = remote[there]
    return sum(run.nbytes for run in runs)


def _failed(reason: str, nbytes: int = 0) -> TransferResult:
    return TransferResult(outcome=Outcome.FAILED_QUIESCED, nbytes=nbytes, reason=reason, is_stale=reason is _STALE)
